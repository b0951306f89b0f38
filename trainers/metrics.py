"""Metrics of generated text: those that compare completions with references, and those that need nothing else.

A metric is resolved once, before training, and computed on all completions of an evaluation. Knows nothing of models,
trainers and ranks.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Real
from typing import Any

import evaluate
import numpy as np
import torch
from datasets import Value
from evaluate import CombinedEvaluations, EvaluationModule

from hf_specgen import Completion, DecodingStats

from .text_metrics import PACKAGES, TEXT_METRICS, alternatives

REPETITION_ORDER = 4  # tokens; the seq-rep-4 of Welleck et al.

Score = Callable[[list[Completion], Any], Any]


@dataclass(frozen=True)
class EvalMetric:
    """
    A metric that is ready to compute.

    Args:
        name (`str`):
            What it is called in messages; the key of its result where it returns a single number.
        needs_references (`bool`):
            Whether it cannot do without references.
        score (`Callable`):
            Takes completions and a reference for each of them, or None for the latter.
        compares_texts (`bool`, *optional*, defaults to `False`):
            Whether a reference has to be a text, or a list of texts of which the best counts.
    """

    name: str
    needs_references: bool
    score: Score
    compares_texts: bool = False

    def check_references(self, references: Sequence[Any] | None) -> None:
        """
        Checks references before training, so that `compute` does not fail for them after it.

        Raises:
            `ValueError` or `TypeError`: where references are missing, or no texts for a metric that compares texts.
        """
        if references is None:
            if self.needs_references:
                raise ValueError(
                    f"The metric {self.name!r} compares with references, but there are none. Give `references`, or a "
                    "data set with a column of them."
                )
            return
        if self.compares_texts:
            for reference in references:
                alternatives(reference, self.name)

    def compute(self, completions: list[Completion], references: Sequence[Any] | None = None) -> dict[str, float]:
        """
        The numbers of one evaluation. A completion that failed counts as an empty text.

        Args:
            completions (`list[Completion]`):
                All of them, any number for each prompt.
            references (`Sequence`, *optional*):
                One for each prompt. A completion is compared with the one at its `index`.

        Raises:
            `ValueError` or `TypeError`: for missing references, and results that are not finite numbers; and whatever
            the metric raises.
        """
        self.check_references(references)
        if not completions:
            raise ValueError(f"The metric {self.name!r} needs at least one completion, but there are none.")
        own = None
        if references is not None:
            if (last := max(completion.index for completion in completions)) >= len(references):
                raise ValueError(
                    f"`references` has to hold one for each prompt, but holds {len(references)}, and there is a "
                    f"completion of prompt number {last}."
                )
            own = [references[completion.index] for completion in completions]
        result = self.score(completions, own)
        values = result if isinstance(result, Mapping) else {self.name: result}
        return {self._checked_key(key): self._to_float(key, value) for key, value in values.items()}

    def _checked_key(self, key: Any) -> str:
        if not isinstance(key, str):
            raise TypeError(f"The keys of what the metric {self.name!r} returns have to be texts, but one is {key!r}.")
        return key

    def _to_float(self, key: str, value: Any) -> float:
        if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and value.ndim == 0:
            value = value.item()
        if not isinstance(value, Real):
            raise TypeError(
                f"The metric {self.name!r} has to return numbers, but its {key!r} is {value!r}. Wrap it in a function "
                "that returns those to report."
            )
        if not math.isfinite(value):  # a best model with NaN would never be replaced
            raise ValueError(f"The metric {self.name!r} has to return finite numbers, but its {key!r} is {value}.")
        return float(value)


def resolve_metrics(metrics: Any) -> list[EvalMetric]:
    r"""
    Makes metrics of everything that can be one.

    Args:
        metrics (`Sequence`, or a single one):
            - `"exact_match"`: the share of completions that equal their reference, but for white space around them.
            - `"rouge_l"`: the mean F-measure of the longest common subsequence of words, 0 to 1 (Lin 2004), by the
              package rouge-score. Its words are made of a-z and 0-9.
            - `"chrf"`: the F-score of character n-grams of the whole corpus, 0 to 100 (Popović 2015), by the package
              sacrebleu.
            - an `evaluate.EvaluationModule` or what `evaluate.combine` returns, or the path or name of an evaluate
              script. It gets texts.
            - a function of completions and references that returns a number or a `dict` of numbers. It gets a list of
              [`Completion`] and one with a reference for each of them, None without references.

            The first three take lists of references of which the best counts.

    Raises:
        `ValueError` or `TypeError`: for what is no metric, cannot be loaded, does not take texts, needs a package that
        is missing, or has the name of another one.
    """
    is_single = isinstance(metrics, (str, EvaluationModule, CombinedEvaluations)) or callable(metrics)
    if not is_single and (isinstance(metrics, Mapping) or not isinstance(metrics, Iterable)):
        raise TypeError(f"`metrics` has to be a list of metrics, but is {metrics!r}.")
    resolved = [_resolve(metric) for metric in ([metrics] if is_single else metrics)]
    names = [metric.name for metric in resolved]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"`metrics` has to hold one metric of a name, but {names.count(name)} are called {name!r}."
            )
    return resolved


def _resolve(metric: Any) -> EvalMetric:
    if isinstance(metric, EvalMetric):
        return metric
    if isinstance(metric, str):
        return _text_metric(metric) if metric in TEXT_METRICS else _of_module(_load(metric))
    if isinstance(metric, (EvaluationModule, CombinedEvaluations)):
        return _of_module(metric)
    if isinstance(metric, type) or not callable(metric):
        raise TypeError(
            f"A metric has to be one of {sorted(TEXT_METRICS)}, an evaluate module, the path of one, or a function, "
            f"but is {metric!r}."
        )
    name = metric.__name__ if inspect.isroutine(metric) else type(metric).__name__
    try:
        inspect.signature(metric).bind([], None)
    except TypeError as error:
        raise TypeError(
            f"The metric {name!r} has to take completions and references, two arguments, but: {error}."
        ) from error
    except ValueError:  # compiled code that does not say what it takes
        pass
    return EvalMetric(name, needs_references=False, score=metric)


def _load(name: str) -> EvaluationModule:
    try:
        return evaluate.load(name, keep_in_memory=True)  # no files that ranks would fight for
    except (OSError, ImportError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"A metric has to be one of {sorted(TEXT_METRICS)} or what evaluate can load, but {name!r} is neither. "
            f"The package evaluate brings no metrics: without the hub it needs the path of a script. {error}"
        ) from error


def _text_metric(name: str) -> EvalMetric:
    package = PACKAGES.get(name)
    if package is not None and find_spec(package) is None:
        raise ValueError(
            f"The metric {name!r} needs the package {package}, which is missing: `pip install 'hf-specgen[metrics]'`."
        )
    return EvalMetric(name, needs_references=True, score=TEXT_METRICS[name], compares_texts=True)


def _of_module(module: EvaluationModule | CombinedEvaluations) -> EvalMetric:
    modules = module.evaluation_modules if isinstance(module, CombinedEvaluations) else [module]
    inputs = {column for each in modules for column in _checked_inputs(each)}
    name = "_".join(each.name for each in modules)
    if "data" in inputs and len(inputs) > 1:
        raise ValueError(f"The metrics {name!r} take {sorted(inputs)}, which `evaluate.combine` does not keep apart.")

    def score(completions: list[Completion], references: list[Any] | None) -> Any:
        texts = [completion.text for completion in completions]
        columns = {"predictions": texts, "references": references, "data": texts}
        result = module.compute(**{column: columns[column] for column in inputs})
        if result is None:
            raise ValueError(f"The metric {name!r} returned nothing: was it made for a `process_id` other than 0?")
        return result

    return EvalMetric(name, needs_references="references" in inputs, score=score)


def _checked_inputs(module: EvaluationModule) -> list[str]:
    """The columns that a module takes, if we have them."""
    formats = module.features if isinstance(module.features, list) else [module.features]
    columns = list(formats[0])
    if unknown := sorted(set(columns) - {"predictions", "references", "data"}):
        raise ValueError(
            f"The metric {module.name!r} takes {columns}, but there are only predictions and references. Wrap it in a "
            f"function that gives it {unknown}."
        )
    kinds = [features[column] for features in formats for column in columns if column != "references"]
    if kinds and not any(isinstance(kind, Value) and kind.dtype in ("string", "large_string") for kind in kinds):
        raise ValueError(
            f"The metric {module.name!r} has to take texts, but takes {kinds[0]}. Wrap it in a function that makes "
            "these of the completions."
        )
    return columns


def builtin_metrics(completions: Sequence[Completion], seconds: float, stats: DecodingStats) -> dict[str, float]:
    r"""
    What can be said of completions alone.

    Args:
        completions (`Sequence[Completion]`):
            All completions of an evaluation; those that failed count in `error_rate` and `tokens_per_second` only.
        seconds (`float`):
            The wall time that it took to generate them, on the slowest rank where there are several.
        stats ([`DecodingStats`]):
            The counts of all ranks.

    Returns:
        `dict[str, float]`:
            - `mean_length`, `max_length`: in tokens, with what ended the text.
            - `distinct_1`, `distinct_2`: different n-grams over all n-grams, of all completions together
              ([Li et al. 2016](https://arxiv.org/abs/1510.03055), who divide by the number of tokens for both). It
              falls with the number of tokens: compare runs on the same prompts.
            - `repetition_rate`: the share of 4-grams that occurred before in the same completion, its mean over the
              completions (seq-rep-4 of [Welleck et al. 2020](https://arxiv.org/abs/1908.04319)); those of fewer than 4
              tokens repeat nothing.
            - `eos_rate`, `length_limited_rate`: the share that ended by a token that ends a text, and by the budget.
            - `error_rate`: the share that failed.
            - `tokens_per_second`.
            - `mean_accepted_length`, `acceptance_rate`: as in [`DecodingStats`], where something was drafted.

        N-grams are of tokens, without the one that ends a text. A rate of nothing is 0.
    """
    served = [completion for completion in completions if completion.finish_reason != "error"]
    lengths = [len(completion.token_ids) for completion in served]
    texts = [each.token_ids[:-1] if each.finish_reason == "eos" else each.token_ids for each in served]
    reasons = [completion.finish_reason for completion in served]
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    metrics = {
        "mean_length": _ratio(sum(lengths), len(lengths)),
        "max_length": float(max(lengths, default=0)),
        "distinct_1": _share_of_distinct([gram for ids in texts for gram in _ngrams(ids, 1)]),
        "distinct_2": _share_of_distinct([gram for ids in texts for gram in _ngrams(ids, 2)]),
        "repetition_rate": _ratio(sum(map(_repetition, texts)), len(texts)),
        "eos_rate": _ratio(reasons.count("eos"), len(reasons)),
        "length_limited_rate": _ratio(reasons.count("length"), len(reasons)),
        "error_rate": _ratio(len(completions) - len(served), len(completions)),
        "tokens_per_second": _ratio(num_tokens, seconds),
    }
    if stats.drafting_rounds:
        metrics |= {"mean_accepted_length": stats.mean_accepted_length, "acceptance_rate": stats.acceptance_rate}
    return metrics


def _ngrams(ids: Sequence[int], order: int) -> list[tuple[int, ...]]:
    return [tuple(ids[start : start + order]) for start in range(len(ids) - order + 1)]


def _repetition(ids: Sequence[int]) -> float:
    grams = _ngrams(ids, REPETITION_ORDER)
    return 1.0 - _share_of_distinct(grams) if grams else 0.0


def _share_of_distinct(grams: list[tuple[int, ...]]) -> float:
    return _ratio(len(set(grams)), len(grams))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
