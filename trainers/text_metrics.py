"""Exact match, ROUGE-L and chrF of completions and their references.

The latter two are computed by rouge-score and sacrebleu, optional packages that are imported where they are used.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hf_specgen import Completion


def alternatives(reference: Any, name: str) -> list[str]:
    """The reference of one prompt as a list of texts; errors name the metric `name`."""
    texts = [reference] if isinstance(reference, str) else reference
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
        raise TypeError(
            f"For the metric {name!r} a reference has to be a text or a list of texts, but one is {reference!r}."
        )
    return list(texts)


def exact_match(completions: list[Completion], references: list[Any]) -> float:
    """The share of completions that equal a reference, but for white space around them. A failed one equals none."""
    matches = [
        each.finish_reason != "error"
        and each.text.strip() in [text.strip() for text in alternatives(reference, "exact_match")]
        for each, reference in zip(completions, references)
    ]
    return sum(matches) / len(matches)


def rouge_l(completions: list[Completion], references: list[Any]) -> float:
    """The mean F-measure of the longest common subsequence of words; of several references the best counts."""
    from rouge_score.rouge_scorer import RougeScorer

    right = [alternatives(reference, "rouge_l") for reference in references]
    if not any(character.isascii() and character.isalnum() for texts in right for text in texts for character in text):
        raise ValueError(
            "The metric 'rouge_l' knows words of a-z and 0-9 only, but no reference has one. Use 'chrf' for other "
            "scripts."
        )
    scorer = RougeScorer(["rougeL"])
    scores = [scorer.score_multi(texts, each.text)["rougeL"].fmeasure for each, texts in zip(completions, right)]
    return float(sum(scores) / len(scores))


def chrf(completions: list[Completion], references: list[Any]) -> float:
    """The F-score of character n-grams of all completions together, 0 to 100."""
    from sacrebleu.metrics import CHRF

    right = [alternatives(reference, "chrf") for reference in references]
    most = max(map(len, right))  # sacrebleu wants the first texts of all, the second ones of all, and so on
    streams = [[texts[number] if number < len(texts) else None for texts in right] for number in range(most)]
    return CHRF().corpus_score([each.text for each in completions], streams).score


TEXT_METRICS: dict[str, Callable[[list[Completion], Any], float]] = {
    "exact_match": exact_match,
    "rouge_l": rouge_l,
    "chrf": chrf,
}
PACKAGES = {"rouge_l": "rouge_score", "chrf": "sacrebleu"}
