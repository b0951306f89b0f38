"""What DSpark emits has the target's distribution, through both entry points: with every Markov head, processors,
policies, and a reduced vocabulary. The faults that would spoil it are noticed."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import TopKLogitsWarper

from hf_specgen import DSparkDrafter, FrequencyPenalty, StepCosts, ThroughputScheduler, enable_speculation
from hf_specgen.drafters import ConfidenceThreshold
from hf_specgen.drafters.widths import DraftLengthPolicy
from hf_specgen.dspark import drafter as dspark_drafter
from hf_specgen.dspark import stock_assistant
from hf_specgen.engine import verification
from tests.support.chi_square import FALSE_ALARM, chi_square_p_value, continuation_probs, target_probs
from tests.support.dspark_models import bigram_target, fitted_drafter

pytestmark = pytest.mark.slow

VOCAB, LENGTH, ROWS = 4, 4, 1000  # a block of two candidates is judged between the first token and the last
NUM_DRAWS, NUM_DRAWS_SLOW = 3_000, 8_000
DRAFTER_SEED = 3
TEXT_LENGTH, NUM_TEXTS, NUM_TEXTS_SLOW = 200, 3, 6  # of the stock entry point, which decodes one row at a time
PROMPT = [3, 1, 2, 0, 2, 0, 3, 1]


@dataclass(frozen=True)
class Case:
    process: Any = lambda ids, logits: logits  # the target's distribution, computed by other means
    settings: dict = field(default_factory=dict)


CASES = {
    "temperature 1": Case(),
    "temperature 0.7 and top-k 3": Case(
        lambda ids, logits: TopKLogitsWarper(3)(ids, logits / 0.7), {"temperature": 0.7, "top_k": 3}
    ),
    "frequency penalty": Case(
        lambda ids, logits: logits - 0.3 * counts_of(ids), {"logits_processor": [FrequencyPenalty(0.3)]}
    ),
}
DRAFTERS = {"whole": {}, "reduced vocabulary": {"draft_vocab_size": 3}, "1+N": {"sample_from_anchor": False}}


def counts_of(ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(ids, VOCAB).sum(dim=1)


@pytest.fixture(scope="module")
def plain():
    target = bigram_target(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        gain=9.0,
        seed=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    target.generation_config.eos_token_id = None
    return target


@pytest.fixture(scope="module")
def target(plain):
    return enable_speculation(copy.deepcopy(plain))


def drafter_for(plain, head: str, kind: str = "whole"):
    return fitted_drafter(plain, head, noise=0.6, seed=DRAFTER_SEED, **DRAFTERS[kind])


def p_value_of(plain, target, case: Case, num_draws: int = NUM_DRAWS, **settings) -> float:
    """Of the continuations that our loop draws; fails if nothing or everything was accepted."""
    torch.manual_seed(1)
    input_ids = torch.tensor(PROMPT).expand(ROWS, -1)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": LENGTH, **case.settings, **settings}
    places = VOCAB ** torch.arange(LENGTH - 1, -1, -1)
    counts, acceptance, num_second = torch.zeros(VOCAB**LENGTH, dtype=torch.long), 0.0, 0
    for _ in range(num_draws // ROWS):
        ids = target.generate(input_ids, attention_mask=torch.ones_like(input_ids), **settings)[:, len(PROMPT) :]
        counts += (ids * places).sum(dim=1).bincount(minlength=VOCAB**LENGTH)
        acceptance += target.speculation_stats.acceptance_rate * ROWS / num_draws
        num_second += target.speculation_stats.judged[1]
    p_value = chi_square_p_value(counts, continuation_probs(plain, case.process, PROMPT, LENGTH))
    print(f"\nmean acceptance {acceptance:.3f}, {num_second} second candidates, p-value {p_value:.3g}")
    assert 0.05 < acceptance < 0.97
    assert num_second > 0, "no second candidate was judged"
    return p_value


FAST = [
    ("vanilla", "temperature 1", 0.0),
    ("gated", "temperature 1", 0.5),
    ("rnn", "temperature 1", 0.5),
    ("vanilla", "temperature 0.7 and top-k 3", 0.5),
    ("gated", "temperature 0.7 and top-k 3", 0.0),
    ("rnn", "temperature 0.7 and top-k 3", 0.5),
    ("vanilla", "frequency penalty", 0.5),
    ("gated", "frequency penalty", 0.5),
    ("rnn", "frequency penalty", 0.0),
]
OTHER_THRESHOLDS = [(head, name, 0.5 - threshold) for head, name, threshold in FAST]


@pytest.mark.parametrize(("head", "name", "threshold"), FAST)
def test_continuations_have_the_law_of_the_target(plain, target, head, name, threshold):
    """Each case wrongly alarms for one seed in 10,000."""
    drafting = {"assistant_model": drafter_for(plain, head), "assistant_confidence_threshold": threshold}
    assert p_value_of(plain, target, CASES[name], **drafting) > FALSE_ALARM
    proposed = target.speculation_stats.proposed
    assert (sum(proposed.values()) < 2 * target.speculation_stats.rounds * 0.7) == (threshold > 0)


@pytest.mark.parametrize(("head", "name", "threshold"), OTHER_THRESHOLDS)
def test_continuations_have_the_law_of_the_target_in_many_draws(plain, target, head, name, threshold):
    drafting = {"assistant_model": drafter_for(plain, head), "assistant_confidence_threshold": threshold}
    assert p_value_of(plain, target, CASES[name], NUM_DRAWS_SLOW, **drafting) > FALSE_ALARM


@pytest.mark.parametrize(("kind", "threshold"), [("reduced vocabulary", 0.5), ("1+N", 0.0)])
def test_other_kinds_of_drafters_keep_the_law(plain, target, kind, threshold):
    drafting = {"assistant_model": drafter_for(plain, "gated", kind), "assistant_confidence_threshold": threshold}
    assert p_value_of(plain, target, CASES["temperature 0.7 and top-k 3"], **drafting) > FALSE_ALARM


def test_scheduler_keeps_the_law(plain, target):
    """Its choice for a row depends on what the others drew, never on what is still to be judged."""
    step_costs = StepCosts({ROWS: 1.0, 2 * ROWS: 1.4, 3 * ROWS: 2.0}, "tiny", "cpu", ROWS, len(PROMPT))
    drafter = DSparkDrafter(drafter_for(plain, "rnn"), draft_length=ThroughputScheduler(step_costs))
    assert p_value_of(plain, target, Case(), assistant_model=drafter) > FALSE_ALARM
    proposed = target.speculation_stats.proposed
    assert 0 < proposed[1] < proposed[0] < target.speculation_stats.rounds


# Negative controls: what has to be noticed in as many draws


class LooksAhead(DraftLengthPolicy):
    """Asks of each candidate the confidence in the one behind it, which knows it."""

    needs_confidence = True

    def lengths(self, confidences, limits, is_live):
        behind = torch.cat([confidences[:, 1:], torch.ones_like(confidences[:, :1])], dim=1)
        return ConfidenceThreshold(0.5).lengths(behind, limits, is_live)


def test_policy_that_looks_ahead_is_noticed(plain, target):
    drafter = DSparkDrafter(drafter_for(plain, "vanilla"), draft_length=LooksAhead())
    assert p_value_of(plain, target, CASES["temperature 1"], assistant_model=drafter) < FALSE_ALARM


def test_correction_from_the_target_instead_of_the_residual_is_noticed(plain, target, monkeypatch):
    monkeypatch.setattr(verification, "_next_weights", target_probs)
    assert p_value_of(plain, target, Case(), assistant_model=drafter_for(plain, "vanilla")) < FALSE_ALARM


def sharper_sample(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    return verification.sample(weights**3, uniforms)


def test_candidates_drawn_from_another_law_than_the_stated_one_are_noticed(plain, target, monkeypatch):
    monkeypatch.setattr(dspark_drafter, "sample", sharper_sample)
    assert p_value_of(plain, target, Case(), assistant_model=drafter_for(plain, "gated")) < FALSE_ALARM


# The stock entry point


@torch.no_grad()
def deviation_of(model, process, texts: list[list[int]]) -> tuple[float, int]:
    """
    How far the tokens of some texts lie from the target's distributions at their places: by the token before them,
    the sums of `1[token] - p` as a chi-square over their covariance, with its degrees of freedom. What was drawn does
    not have to be independent for this, only to follow the distribution given all before it.
    """
    difference = torch.zeros(VOCAB, VOCAB, dtype=torch.double)
    covariance = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.double)
    for text in texts:
        ids = torch.tensor([text])
        logits = model(input_ids=ids).logits[0]
        for place in range(len(PROMPT), len(text)):
            law = process(ids[:, :place], logits[place - 1][None])[0].double().softmax(dim=-1)
            assert law[text[place]] > 0, "a token of probability 0 was drawn"
            difference[text[place - 1]] += torch.eye(VOCAB)[text[place]] - law
            covariance[text[place - 1]] += law.diag() - law[:, None] * law
    inverse = torch.linalg.pinv(covariance, rtol=1e-6, hermitian=True)
    statistic = torch.einsum("bi,bij,bj->", difference, inverse, difference)
    return float(statistic), int(torch.linalg.matrix_rank(covariance, rtol=1e-6, hermitian=True).sum())


def stock_p_value(plain, draft, case: Case, num_texts: int = NUM_TEXTS) -> float:
    input_ids, texts = torch.tensor([PROMPT]), []
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": TEXT_LENGTH, **case.settings}
    settings["attention_mask"] = torch.ones_like(input_ids)  # the prompt holds the padding id
    counting = CountingStreamer()
    for seed in range(num_texts):
        torch.manual_seed(seed)
        texts.append(plain.generate(input_ids, assistant_model=draft, streamer=counting, **settings)[0].tolist())
    num_accepted = sum(size - 1 for size in counting.sizes) / len(counting.sizes)
    statistic, degrees = deviation_of(plain, case.process, texts)
    p_value = float(torch.special.gammaincc(torch.tensor(degrees / 2), torch.tensor(statistic / 2)))
    print(f"\n{num_accepted:.2f} accepted per round, {degrees} degrees, p-value {p_value:.3g}")
    assert 0.1 < num_accepted < 3.5
    return p_value


class CountingStreamer:
    """Remembers how many tokens each round gave."""

    def __init__(self):
        self.sizes: list[int] = []

    def put(self, value):
        if value.shape[-1] != len(PROMPT):
            self.sizes.append(value.shape[-1])

    def end(self):
        pass


@pytest.mark.parametrize(("head", "name", "threshold"), OTHER_THRESHOLDS)
def test_stock_entry_point_has_the_law_of_the_target(plain, head, name, threshold):
    """Each case wrongly alarms for one seed in 10,000."""
    draft = drafter_for(plain, head)
    draft.confidence_threshold = threshold
    assert stock_p_value(plain, draft, CASES[name]) > FALSE_ALARM


@pytest.mark.parametrize(("head", "name", "threshold"), FAST)
def test_stock_entry_point_has_the_law_of_the_target_in_long_texts(plain, head, name, threshold):
    draft = drafter_for(plain, head)
    draft.confidence_threshold = threshold
    assert stock_p_value(plain, draft, CASES[name], NUM_TEXTS_SLOW) > FALSE_ALARM


@pytest.mark.parametrize(("kind", "threshold"), [("reduced vocabulary", 0.0), ("1+N", 0.5)])
def test_stock_entry_point_keeps_the_law_with_other_kinds_of_drafters(plain, kind, threshold):
    draft = drafter_for(plain, "vanilla", kind)
    draft.confidence_threshold = threshold
    assert stock_p_value(plain, draft, CASES["temperature 0.7 and top-k 3"]) > FALSE_ALARM


def test_other_law_of_the_candidates_is_noticed_at_the_stock_door(plain, monkeypatch):
    monkeypatch.setattr(stock_assistant, "sample", sharper_sample)
    assert stock_p_value(plain, drafter_for(plain, "rnn"), CASES["temperature 1"]) < FALSE_ALARM
