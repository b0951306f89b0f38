"""Scores of drafted positions are those that plain decoding would compute one token at a time."""

import copy

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, TopKLogitsWarper, WatermarkingConfig

from hf_specgen import (
    Candidates,
    CausalLMDrafter,
    Decoder,
    DecodingRules,
    Drafter,
    FrequencyPenalty,
    LogitBias,
    PresencePenalty,
    RepetitionPenalty,
    Request,
    TokenPenalties,
    UndecodableMask,
    enable_speculation,
)
from hf_specgen.engine.batch import Rows
from hf_specgen.engine.request import PaddedBatch
from hf_specgen.engine.scoring import score
from tests.support.models import VOCAB_SIZE, assert_same_as_plain, left_padded, make_model, noisy_copy, take_slot

K, FEW_IDS = 4, 9  # texts over few ids, so that n-grams and penalties have something to find
PROMPT_LENGTHS, NUM_GENERATED, LENGTHS = [6, 1, 3, 4], [3, 0, 5, 2], [4, 3, 0, 2]
MAX_NEW_TOKENS = 8


class Doubling(LogitsProcessor):
    """Doubles the score of the last id, in the tensor that it was given or in a new one."""

    def __init__(self, is_in_place: bool):
        self.is_in_place = is_in_place

    def __call__(self, input_ids, scores):
        scores = scores if self.is_in_place else scores.clone()
        last = input_ids[:, -1:]
        return scores.scatter_(1, last, scores.gather(1, last) * 2 - 1)


class ByRow(LogitsProcessor):
    """Carries a tensor with one entry per row of the batch, as some of transformers' do."""

    def __init__(self, rows: int):
        self.shift = torch.arange(rows)[:, None].float()

    def __call__(self, input_ids, scores):
        return scores + self.shift * input_ids.shape[1]


def allowed_after(batch_id: int, ids: torch.Tensor) -> list[int]:
    """The few ids, and some others by the row and the last two tokens."""
    return [i for i in range(VOCAB_SIZE) if 3 <= i < 3 + FEW_IDS or (i + batch_id + int(ids[-2:].sum())) % 3]


SETTINGS = {
    "min_new_tokens": {"min_new_tokens": 4},
    "min_length": {"min_length": 8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[5], [6, 7], [3, 4, 5]]},
    "suppress_tokens": {"suppress_tokens": [4, 9]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [8, 10]},
    "forced_bos_token_id": {"forced_bos_token_id": 1},
    "forced_eos_token_id": {"forced_eos_token_id": 2},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.3)},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed_after},
    "sequence_bias": {"sequence_bias": [[[5], 2.0], [[6, 7], -3.0]]},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.4},
    "watermarking_config": {"watermarking_config": WatermarkingConfig()},
    "watermarking over two tokens": {"watermarking_config": WatermarkingConfig(context_width=2)},
    "renormalize_logits": {"renormalize_logits": True},
    "remove_invalid_values": {"remove_invalid_values": True},
    "warpers": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "rarer warpers": {"do_sample": True, "typical_p": 0.9, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3, "top_h": 0.8},
    "our penalties": {"logits_processor": [RepetitionPenalty(1.3), FrequencyPenalty(0.4), PresencePenalty(-0.2)]},
    "fused penalties": {"logits_processor": [TokenPenalties(1.2, 0.3, 0.1, exempt_ids=[4])]},
    "penalty that skips padding": {"logits_processor": [FrequencyPenalty(0.4, pad_token_id=0)]},
    "bias and mask": {"logits_processor": [LogitBias({"5": 2, 6: -1.0}), UndecodableMask(60, pad_token_id=0)]},
    "foreign, in place": {"logits_processor": [Doubling(True)]},
    "foreign, out of place": {"logits_processor": [Doubling(False)]},
    "many": {
        "logits_processor": [Doubling(True), FrequencyPenalty(0.5), LogitBias({7: 1.0})],
        "do_sample": True,
        "no_repeat_ngram_size": 3,
        "repetition_penalty": 1.2,
        "min_new_tokens": 4,
        "suppress_tokens": [4],
        "temperature": 0.8,
        "top_k": 30,
        "watermarking_config": WatermarkingConfig(),
        "renormalize_logits": True,
    },
}


def built_by_generate(model, batch: dict, **settings) -> LogitsProcessorList:
    """The processors and warpers that `generate` prepares for a call."""
    found = []

    class Recorder(type(model)):
        def _sample(self, input_ids, logits_processor, *args, **kwargs):
            found.append(logits_processor)
            return input_ids

    recorder = copy.copy(model)
    recorder.__class__ = Recorder
    recorder.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, **{"do_sample": False, "top_k": 0, **settings})
    return found[0]


@pytest.fixture(scope="module")
def texts() -> dict:
    """Prompts, generated tokens and candidates, the same for all tests."""
    generator = torch.Generator().manual_seed(3)

    def random_ids(count: int) -> list[int]:
        return torch.randint(3, 3 + FEW_IDS, (count,), generator=generator).tolist()

    return {
        "prompts": [random_ids(length) for length in PROMPT_LENGTHS],
        "generated": [random_ids(length) for length in NUM_GENERATED],
        "candidates": torch.tensor([random_ids(K) for _ in PROMPT_LENGTHS]),
        "logits": torch.randn(len(PROMPT_LENGTHS), K + 1, VOCAB_SIZE, generator=generator) * 3,
    }


def padded_prompts(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]),
    }


def placed(model, texts: dict, rules: list[DecodingRules], batch: PaddedBatch | None) -> Rows:
    """Rows in the middle of decoding, each with another number of generated tokens."""
    rows = Rows(model, len(texts["prompts"]))
    for row, (prompt, generated) in enumerate(zip(texts["prompts"], texts["generated"], strict=True)):
        take_slot(rows, Request(prompt, MAX_NEW_TOKENS, rules[row], batch=batch, batch_row=row if batch else 0))
        rows.commit(row, generated)
    return rows


def assert_same(found: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=lambda text: f"{where}: {text}")


@pytest.mark.parametrize("name", SETTINGS)
def test_lone_requests_are_judged_on_their_own_unpadded_ids(llama, texts, name):
    alone = [{"input_ids": torch.tensor([prompt])} for prompt in texts["prompts"]]
    processors = [built_by_generate(llama, batch, **SETTINGS[name]) for batch in alone]
    assert all(len(p) > 0 for p in processors)
    rules = [DecodingRules(p, do_sample="do_sample" in SETTINGS[name]) for p in processors]
    rows = placed(llama, texts, rules, batch=None)
    raw = texts["logits"].clone()
    found = score(rows, raw, texts["candidates"], torch.tensor(LENGTHS)).values
    assert torch.equal(raw, texts["logits"]), "the model's output was changed"
    num_changed = 0
    for row, length in enumerate(LENGTHS):
        text = texts["prompts"][row] + texts["generated"][row] + texts["candidates"][row].tolist()
        for position in range(length + 1):
            ids = torch.tensor([text[: len(text) - K + position]])
            expected = processors[row](ids, texts["logits"][[row], position].clone())[0]
            assert_same(found[row, position], expected, f"row {row}, position {position}")
            num_changed += not torch.equal(expected, texts["logits"][row, position])
    assert num_changed > 0 or name == "remove_invalid_values", "the processor did nothing"


@pytest.mark.parametrize("name", [*SETTINGS, "by row"])
def test_rows_of_a_batch_are_judged_as_on_the_padded_batch(llama, texts, name):
    settings = {"logits_processor": [ByRow(4)]} if name == "by row" else SETTINGS[name]
    batch = padded_prompts(texts["prompts"])
    processors = built_by_generate(llama, batch, **settings)
    rules = DecodingRules(processors, do_sample="do_sample" in settings)
    rows = placed(llama, texts, [rules] * 4, PaddedBatch(batch["input_ids"], MAX_NEW_TOKENS))
    raw = texts["logits"].clone()
    found = score(rows, raw, texts["candidates"], torch.tensor(LENGTHS)).values
    assert torch.equal(raw, texts["logits"]), "the model's output was changed"
    for row, length in enumerate(LENGTHS):
        own = texts["generated"][row] + texts["candidates"][row].tolist()
        for position in range(length + 1):
            generated = torch.full((4, NUM_GENERATED[row] + position), 3)  # in other rows anything will do
            generated[row] = torch.tensor(own[: NUM_GENERATED[row] + position])
            scores = torch.zeros(4, VOCAB_SIZE)
            scores[row] = texts["logits"][row, position]
            expected = processors(torch.cat([batch["input_ids"], generated], dim=1), scores)[row]
            assert_same(found[row, position], expected, f"row {row}, position {position}")


@pytest.mark.parametrize("name", SETTINGS)
def test_position_by_position_is_the_same_as_all_at_once(llama, texts, name):
    """A drafter asks for one position at a time, after the candidates that it has drafted."""
    batch = padded_prompts(texts["prompts"])
    processors = built_by_generate(llama, batch, **SETTINGS[name])
    rules = DecodingRules(processors, do_sample="do_sample" in SETTINGS[name])
    rows = placed(llama, texts, [rules] * 4, PaddedBatch(batch["input_ids"], MAX_NEW_TOKENS))
    together = score(rows, texts["logits"], texts["candidates"], torch.tensor(LENGTHS)).values
    for position in range(K + 1):
        drafted = texts["candidates"][:, :position]
        lengths = torch.tensor(LENGTHS).clamp(max=position)
        found = score(rows, texts["logits"][:, [position]], drafted, lengths, first=position).values
        for row, length in enumerate(LENGTHS):
            if position <= length:
                assert_same(found[row, 0], together[row, position], f"row {row}, position {position}")


def test_empty_slots_and_rows_without_processors_keep_the_raw_scores(llama, texts):
    rules = [DecodingRules(LogitsProcessorList([LogitBias({5: 1.0})])), *[DecodingRules()] * 3]
    rows = placed(llama, texts, rules, batch=None)
    rows.leave(2)
    found = score(rows, texts["logits"], texts["candidates"], torch.tensor(LENGTHS)).values
    assert torch.equal(found[1:], texts["logits"][1:])
    assert torch.equal(found[0, :, 5], texts["logits"][0, :, 5] + 1.0)


def test_half_precision_is_judged_in_fp32(llama, texts):
    rules = DecodingRules(LogitsProcessorList([FrequencyPenalty(0.3)]))
    rows = placed(llama, texts, [rules] * 4, batch=None)
    raw = texts["logits"].bfloat16()
    found = score(rows, raw, texts["candidates"], torch.tensor(LENGTHS)).values
    assert found.dtype == torch.float32
    expected = score(rows, raw.float(), texts["candidates"], torch.tensor(LENGTHS)).values
    assert_same(found, expected, "bfloat16")


def test_foreign_processor_is_called_once_per_number_of_generated_tokens(llama, texts):
    shapes = []

    def counting(input_ids, scores):
        shapes.append((tuple(input_ids.shape), len(scores)))
        return scores

    rules = DecodingRules(LogitsProcessorList([counting]))
    batch = PaddedBatch(padded_prompts(texts["prompts"])["input_ids"], MAX_NEW_TOKENS)
    rows = placed(llama, texts, [rules] * 4, batch)
    score(rows, texts["logits"], texts["candidates"], torch.tensor(LENGTHS))
    numbers = {
        n + position for n, length in zip(NUM_GENERATED, LENGTHS, strict=True) for position in range(length + 1)
    }
    assert shapes == [((4, 6 + number), 4) for number in sorted(numbers)]


# Prefixes that plain decoding never reaches


class ConstantDrafter(Drafter):
    """Proposes the given tokens, whatever came before."""

    def __init__(self, *token_ids: int):
        self.token_ids = torch.tensor(token_ids)

    def make_cache(self, rows):
        return None

    def observe(self, rows, candidates, outputs):
        pass

    def draft(self, rows, max_tokens):
        lengths = max_tokens.clamp(max=len(self.token_ids))
        return Candidates(self.token_ids[: int(lengths.max())].expand(rows.num_spanned, -1), lengths)


class UnknownPrefix(Exception):
    pass


def even_only(complain):
    """Allows even ids after the prompt of three; calls `complain` for a prefix with an odd one."""

    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        return complain() if bool((ids[3:] % 2 == 1).any()) else list(range(4, VOCAB_SIZE, 2))

    return allowed


def refuse():
    raise UnknownPrefix


@pytest.mark.parametrize("complain", [refuse, list], ids=["raises", "allows nothing"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_prefix_function_is_not_asked_about_what_it_has_forbidden(llama, complain, do_sample):
    settings = {"prefix_allowed_tokens_fn": even_only(complain), "max_new_tokens": 12, "eos_token_id": None}
    drafting = {"assistant_model": ConstantDrafter(7, 8, 9)}
    if not do_sample:
        assert_same_as_plain(llama, left_padded([3, 2]), drafting, do_sample=False, **settings)
        return
    target = enable_speculation(copy.deepcopy(llama))
    torch.manual_seed(0)
    ids = target.generate(**left_padded([3, 2]), **drafting, do_sample=True, **settings)
    assert (ids[:, 3:] % 2 == 0).all()


@pytest.mark.parametrize("complain", [refuse, list], ids=["raises", "allows nothing"])
def test_prefix_function_is_not_asked_about_what_another_processor_has_forbidden(llama, complain):
    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        return complain() if bool((ids[3:] == 7).any()) else list(range(3, VOCAB_SIZE))

    settings = {"prefix_allowed_tokens_fn": allowed, "bad_words_ids": [[7]], "max_new_tokens": 12}
    drafting = {"assistant_model": ConstantDrafter(7, 7)}
    assert_same_as_plain(llama, left_padded([3, 2]), drafting, do_sample=False, eos_token_id=None, **settings)


def test_only_allowed_token_is_forced_even_if_another_processor_forbids_it(llama):
    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        return [7] if len(ids) % 2 else list(range(8, VOCAB_SIZE))

    settings = {"prefix_allowed_tokens_fn": allowed, "bad_words_ids": [[7]], "max_new_tokens": 9}
    drafting = {"assistant_model": noisy_copy(llama), "num_assistant_tokens": 3}
    assert_same_as_plain(llama, left_padded([3, 2]), drafting, do_sample=False, eos_token_id=None, **settings)


class Grammar(LogitsProcessor):
    """Allows even ids; refuses rows that hold an odd one behind the prompt of three."""

    def __call__(self, input_ids, scores):
        if bool((input_ids[:, 3:] % 2 == 1).any()):
            raise UnknownPrefix
        scores[:, 1::2] = -torch.inf
        return scores


def test_foreign_processor_may_refuse_what_it_has_forbidden(llama):
    settings = {"logits_processor": [Grammar()], "max_new_tokens": 12, "eos_token_id": None, "do_sample": False}
    assert_same_as_plain(llama, left_padded([3, 2]), {"assistant_model": ConstantDrafter(8, 7, 8)}, **settings)


# Failures


class FailingAt(LogitsProcessor):
    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.length:
            raise UnknownPrefix(f"no {self.length} tokens")
        return scores


def texts_of(model, requests: list[Request]) -> list[list[int]]:
    for _ in Decoder(model, CausalLMDrafter(noisy_copy(model), 3), max_batch_size=2).run(requests):
        pass
    return [request.token_ids for request in requests]


def test_failing_processor_fails_its_own_request_only(llama):
    failing = DecodingRules(LogitsProcessorList([FailingAt(8)]))
    requests = [Request([5, 6, 7], 12), Request([8, 9, 10], 12, failing), Request([11], 12), Request([12], 12)]
    found = texts_of(llama, requests)
    assert requests[1].finish_reason == "error"
    assert isinstance(requests[1].error, UnknownPrefix)
    assert len(found[1]) <= 5
    others = [0, 2, 3]
    assert all(requests[i].error is None and requests[i].finish_reason in ("length", "eos") for i in others)
    assert [found[i] for i in others] == [texts_of(llama, [Request(requests[i].prompt_ids, 12)])[0] for i in others]


def test_request_with_nothing_left_to_choose_fails_by_name(llama):
    nothing = DecodingRules(
        LogitsProcessorList([TopKLogitsWarper(5), LogitBias(dict.fromkeys(range(64), -torch.inf))])
    )
    requests = [Request([5, 6, 7], 6, nothing), Request([8, 9], 6)]
    texts_of(llama, requests)
    assert requests[0].finish_reason == "error" and requests[0].token_ids == []
    with pytest.raises(ValueError, match="`LogitBias` masked all that remained"):
        raise requests[0].error
    assert len(requests[1].token_ids) == 6 or requests[1].finish_reason == "eos"


def test_failing_processor_of_a_batch_is_raised(llama):
    target = enable_speculation(copy.deepcopy(llama))
    with pytest.raises(UnknownPrefix):
        target.generate(
            **left_padded([3, 2]),
            assistant_model=make_model(seed=1),
            logits_processor=[FailingAt(8)],
            max_new_tokens=12,
            eos_token_id=None,
        )
