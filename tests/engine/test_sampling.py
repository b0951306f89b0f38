"""What speculative sampling emits has the target's distribution: draws against all continuations, enumerated."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specgen import (
    Candidates,
    CausalLMDrafter,
    Decoder,
    DecodingRules,
    Drafter,
    FrequencyPenalty,
    LogitBias,
    RepetitionPenalty,
    Request,
    enable_speculation,
)
from hf_specgen.engine import verification
from tests.support.chi_square import FALSE_ALARM, chi_square_p_value, continuation_probs, target_probs
from tests.support.models import cycle_model, left_padded, make_model, noisy_copy

pytestmark = pytest.mark.slow

VOCAB, LENGTH, ROWS = 6, 4, 1000  # a block of two candidates is judged between the first token and the last
NUM_DRAWS = 10_000  # enough for both negative controls, one of which needs half of it
PROMPT = [3, 1, 4, 0, 2, 5, 3, 1]


@pytest.fixture(scope="module")
def plain():
    model = make_model(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        gain=9.0,
        seed=3,
    )
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def target(plain):
    return enable_speculation(copy.deepcopy(plain))


@pytest.fixture(scope="module")
def draft(plain):
    return noisy_copy(plain, scale=1.2)


def counts_of(ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(ids, VOCAB).sum(dim=1)


def draw(model, seed: int, num_draws: int = NUM_DRAWS, **settings) -> tuple[torch.Tensor, float]:
    """How often each continuation was drawn, and the mean share of judged candidates that were kept."""
    torch.manual_seed(seed)
    input_ids = torch.tensor(PROMPT).expand(ROWS, -1)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": LENGTH, **settings}
    if isinstance(settings.get("assistant_model"), PreTrainedModel):
        settings["num_assistant_tokens"] = 3
    places = VOCAB ** torch.arange(LENGTH - 1, -1, -1)
    counts, acceptance = torch.zeros(VOCAB**LENGTH, dtype=torch.long), 0.0
    for _ in range(num_draws // ROWS):
        ids = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **settings)[:, len(PROMPT) :]
        counts += (ids * places).sum(dim=1).bincount(minlength=VOCAB**LENGTH)
        stats = model.speculation_stats
        assert stats.judged[1] > 0, "no second candidate was judged"
        acceptance += stats.acceptance_rate * ROWS / num_draws
    return counts, acceptance


@dataclass(frozen=True)
class Case:
    process: Any = lambda ids, logits: logits  # the target's distribution, computed by other means
    settings: dict = field(default_factory=dict)
    drafter: dict | None = None  # settings of a drafter, None for the draft model itself


CASES = {
    "temperature 1": Case(),
    "temperature 0.7 and top-k 3": Case(
        lambda ids, logits: TopKLogitsWarper(3)(ids, logits / 0.7), {"temperature": 0.7, "top_k": 3}
    ),
    "top-p": Case(lambda ids, logits: TopPLogitsWarper(0.8)(ids, logits), {"top_p": 0.8}),
    "frequency penalty": Case(
        lambda ids, logits: logits - 0.8 * counts_of(ids), {"logits_processor": [FrequencyPenalty(0.8)]}
    ),
    "bias": Case(
        lambda ids, logits: logits + torch.tensor([0.0, 1.5, 0.0, 0.0, -2.0, 0.0]),
        {"logits_processor": [LogitBias({1: 1.5, "4": -2})]},
    ),
    "draft with another temperature": Case(drafter={"temperature": 1.7}),
    "draft that stops on low confidence": Case(drafter={"probability_threshold": 0.5}),
    "greedy draft": Case(drafter={"temperature": 0.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_continuations_have_the_distribution_of_the_target(plain, target, draft, name):
    """Each case wrongly alarms for one seed in 10,000."""
    case = CASES[name]
    assistant = draft if case.drafter is None else CausalLMDrafter(draft, num_assistant_tokens=3, **case.drafter)
    counts, acceptance = draw(target, 1, assistant_model=assistant, **case.settings)
    p_value = chi_square_p_value(counts, continuation_probs(plain, case.process, PROMPT, LENGTH))
    print(f"{name}: mean acceptance {acceptance:.3f}, p-value {p_value:.3g}")
    assert 0.05 < acceptance < 0.97
    assert p_value > FALSE_ALARM


def test_prompt_lookup_has_the_distribution_of_the_target(plain, target):
    counts, acceptance = draw(target, 2, prompt_lookup_num_tokens=3, max_matching_ngram_size=2)
    p_value = chi_square_p_value(counts, continuation_probs(plain, Case().process, PROMPT, LENGTH))
    print(f"mean acceptance {acceptance:.3f}, p-value {p_value:.3g}")
    assert 0.05 < acceptance < 0.97
    assert p_value > FALSE_ALARM


def test_draft_equal_to_the_target_has_its_distribution(plain, target):
    counts, acceptance = draw(target, 3, assistant_model=plain)
    assert acceptance > 0.999
    assert chi_square_p_value(counts, continuation_probs(plain, Case().process, PROMPT, LENGTH)) > FALSE_ALARM


def test_correction_from_the_target_instead_of_the_residual_is_noticed(plain, target, draft, monkeypatch):
    monkeypatch.setattr(verification, "_next_weights", target_probs)
    counts, acceptance = draw(target, 1, assistant_model=draft, num_draws=NUM_DRAWS // 2)
    assert 0.05 < acceptance < 0.97
    assert chi_square_p_value(counts, continuation_probs(plain, Case().process, PROMPT, LENGTH)) < FALSE_ALARM


def test_wrong_distribution_is_noticed(plain, target, draft):
    """A tenth of the temperature is enough to see."""
    counts, _ = draw(target, 1, assistant_model=draft, temperature=0.9)
    assert chi_square_p_value(counts, continuation_probs(plain, Case().process, PROMPT, LENGTH)) < FALSE_ALARM


class ConstantDrafter(Drafter):
    """Proposes one token over and over."""

    def __init__(self, token_id: int, length: int):
        self.token_id, self.length = token_id, length

    def make_cache(self, rows):
        return None

    def observe(self, rows, candidates, outputs):
        pass

    def draft(self, rows, max_tokens):
        lengths = max_tokens.clamp(max=self.length)
        return Candidates(torch.full((rows.num_spanned, int(lengths.max())), self.token_id), lengths)


def test_equal_candidates_are_judged_with_the_earlier_ones_counted():
    plain = cycle_model([3] * VOCAB, runner_up=0.8)  # wants token 3 with 10, anything else with 8
    penalties = [FrequencyPenalty(0.9)]  # 9.1 and 8.2 after one and two of them, 7.3 after three
    input_ids = torch.tensor([[1]])
    settings = {"max_new_tokens": 5, "do_sample": False, "logits_processor": penalties, "pad_token_id": 0}
    expected = plain.generate(input_ids, **settings)[0, 1:].tolist()
    assert expected[:4] == [3, 3, 3, 0]
    target = enable_speculation(copy.deepcopy(plain))
    found = target.generate(input_ids, assistant_model=ConstantDrafter(3, 3), trace=True, **settings)
    assert found[0, 1:].tolist() == expected
    first = target.speculation_stats.traces[0]
    assert (first.proposed, first.num_accepted, first.next_token_id) == ((3, 3, 3), 2, 0)


@pytest.mark.parametrize(("noise", "is_whole"), [(0.0, True), (0.5, False)])
def test_draft_equal_to_the_target_is_accepted_whole_with_warpers_and_penalties(llama, noise, is_whole):
    draft = copy.deepcopy(llama) if noise == 0 else noisy_copy(llama, noise)
    target = enable_speculation(copy.deepcopy(llama))
    torch.manual_seed(0)
    target.generate(
        **left_padded([1, 4, 9, 6]),
        assistant_model=draft,
        num_assistant_tokens=4,
        do_sample=True,
        temperature=0.7,
        top_k=5,
        max_new_tokens=40,
        eos_token_id=None,
        logits_processor=[RepetitionPenalty(1.2), FrequencyPenalty(0.5)],
    )
    stats = target.speculation_stats
    print(f"mean acceptance {stats.acceptance_rate:.3f}")
    assert (stats.accepted == stats.proposed) is is_whole
    assert sum(stats.accepted.values()) > 0


def test_global_seed_gives_one_text(llama):
    target, draft = enable_speculation(copy.deepcopy(llama)), noisy_copy(llama)

    def text(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        settings = {"do_sample": True, "max_new_tokens": 20, "num_assistant_tokens": 3}
        return target.generate(**left_padded([3, 8]), assistant_model=draft, **settings).tolist()

    assert text(5) == text(5) != text(6)


def seeded_requests() -> list[Request]:
    warpers = [
        [],
        [FrequencyPenalty(0.5), TemperatureLogitsWarper(0.7)],
        [TopKLogitsWarper(5)],
        [TemperatureLogitsWarper(1.5), TopPLogitsWarper(0.9)],
        [],
    ]
    return [
        Request(
            list(range(3 + seed, 6 + 3 * seed)),
            max_new_tokens=30 - 5 * seed,
            rules=DecodingRules(LogitsProcessorList(processors), do_sample=seed != 2),
            seed=seed,
        )
        for seed, processors in enumerate(warpers)
    ]


@pytest.mark.parametrize("settings", [{}, {"probability_threshold": 0.2}, {"schedule": "heuristic"}])
def test_seeded_request_has_one_text_alone_and_among_others(llama, settings):
    draft = noisy_copy(llama)

    def decode(requests: list[Request], max_batch_size: int) -> list[list[int]]:
        decoder = Decoder(llama, CausalLMDrafter(draft, 4, **settings), max_batch_size)
        for _ in decoder.run(requests):
            pass
        assert len(requests) == 1 or 0 < decoder.stats.acceptance_rate < 1
        return [request.token_ids for request in requests]

    alone = [decode([request], 1)[0] for request in seeded_requests()]
    assert decode(seeded_requests(), 5) == alone
    assert decode(seeded_requests(), 2) == alone
    assert decode(seeded_requests()[::-1], 3) == alone[::-1]
    assert len({tuple(text[:10]) for text in alone}) == len(alone)
