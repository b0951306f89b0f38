"""Stopping criteria with a memory: they are asked as plain `generate` asks them, in any batch."""

import copy

import pytest
import torch
from transformers import MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList

from hf_specgen import CausalLMDrafter, Decoder, DecodingRules, PromptLookupDrafter, Request, enable_speculation
from tests.support.criteria import CountsCalls, EndsAllOnceSeen, EndsOnRepetition, EndsRowsOnceSeen
from tests.support.generate_calls import TOKENIZER
from tests.support.models import EOS, PAD, VOCAB_SIZE, left_padded, make_model, noisy_copy, ragged_lengths

MAX_NEW_TOKENS = 24
KINDS = {
    "counter": lambda length: CountsCalls(9),
    "flags": lambda length: EndsRowsOnceSeen(*range(0, VOCAB_SIZE, 7)),
    "one for all": lambda length: EndsAllOnceSeen(*range(3, VOCAB_SIZE, 6)),
    "texts": lambda length: EndsOnRepetition(),
}


@pytest.fixture(scope="module")
def models():
    found = []
    for seed in range(3):
        plain = make_model(seed=seed)
        found.append((plain, enable_speculation(copy.deepcopy(plain)), noisy_copy(plain)))
    return found


def drafting_of(kind, draft):
    return {"assistant_model": draft} if kind == "draft" else {"prompt_lookup_num_tokens": 4}


def assert_same_in_batches(models, make_criteria, drafting, **settings):
    """30 batches; returns how many rows were ahead of another one, so that they had to give tokens back or wait."""
    num_shorter = 0
    for seed in range(30):
        plain, ours, draft = models[seed % len(models)]
        rows = (1, 2, 4)[seed % 3]
        batch = left_padded(ragged_lengths(rows, seed), seed=seed)
        length = batch["input_ids"].shape[1]
        call = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, **settings}
        criteria = make_criteria(length, rows)
        expected = plain.generate(**batch, **call, stopping_criteria=criteria)
        again = make_criteria(length, rows)
        found = ours.generate(**batch, **call, stopping_criteria=again, **drafting_of(drafting, draft))
        assert found.tolist() == expected.tolist(), seed
        for one, other in zip(criteria, again):
            assert str(vars(one)) == str(vars(other)), "it does not remember what plain decoding leaves it with"
        num_shorter += expected.shape[1] < length + MAX_NEW_TOKENS
    return num_shorter


@pytest.mark.slow
@pytest.mark.parametrize("drafting", ["draft", "look-up"])
@pytest.mark.parametrize("pad", [PAD, EOS])
@pytest.mark.parametrize("kind", KINDS)
def test_criterion_with_a_memory_ends_rows_as_in_plain_generate(models, kind, pad, drafting):
    def make_criteria(length, rows):
        return StoppingCriteriaList([KINDS[kind](length)])

    assert assert_same_in_batches(models, make_criteria, drafting, pad_token_id=pad) > 3


@pytest.mark.slow
@pytest.mark.parametrize("drafting", ["draft", "look-up"])
@pytest.mark.parametrize("pad", [PAD, 20])
def test_criterion_of_lm_evaluation_harness_loses_no_text(models, pad, drafting):
    """It keeps a flag for each row and says when all have stopped; the text of eos is among its stops."""
    utils = pytest.importorskip("lm_eval.models.utils_hf")

    def make_criteria(length, rows):
        stops = [TOKENIZER.decode([20]), TOKENIZER.decode([9])]
        return utils.stop_sequences_criteria(TOKENIZER, stops, length, rows)

    assert assert_same_in_batches(models, make_criteria, drafting, pad_token_id=pad, eos_token_id=[20, 41, 33]) > 3


@pytest.mark.slow
def test_criteria_with_memories_go_together_with_other_stops(models):
    def make_criteria(length, rows):
        known = MaxTimeCriteria(max_time=1000.0, initial_timestamp=0.0)
        known.initial_timestamp = float("inf")  # never late
        return StoppingCriteriaList([EndsOnRepetition(), known, CountsCalls(15)])

    settings = {"eos_token_id": [EOS, 7, 21], "stop_strings": [TOKENIZER.decode([9])], "tokenizer": TOKENIZER}
    assert_same_in_batches(models, make_criteria, "draft", **settings)


class FailsAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.length:
            raise LookupError("no opinion")
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("num_kept", [0, 1, 4, 7])
def test_criterion_that_raises_keeps_the_tokens_before(models, num_kept):
    """Whatever block the token stands in."""
    plain, _, _ = models[0]
    prompt = [5, 9, 11]
    expected = plain.generate(torch.tensor([prompt]), max_new_tokens=12, eos_token_id=None)[0, 3:].tolist()
    for drafter in (None, CausalLMDrafter(copy.deepcopy(plain), 5), PromptLookupDrafter(4)):
        rules = DecodingRules(stopping_criteria=StoppingCriteriaList([FailsAt(3 + num_kept + 1)]))
        request, company = Request(prompt, 12, rules), Request(prompt, 12)
        decoder = Decoder(plain, drafter)
        for _ in decoder.run([request, company]):
            pass
        assert (request.token_ids, request.finish_reason) == (expected[:num_kept], "error")
        assert isinstance(request.error, LookupError)
        assert (company.token_ids, company.finish_reason) == (expected, "length")
        assert decoder.stats.tokens == num_kept + 12


def test_counts_leave_out_what_was_given_back(models):
    plain, ours, draft = models[0]
    batch = left_padded([5, 1, 9, 3], seed=3)
    for seed in range(5):
        criteria = StoppingCriteriaList([CountsCalls(8 + seed)])
        found = ours.generate(
            **batch, max_new_tokens=30, eos_token_id=None, pad_token_id=PAD, assistant_model=draft,
            stopping_criteria=criteria, trace=True,
        )  # fmt: skip
        stats = ours.speculation_stats
        assert stats.tokens == found[:, batch["input_ids"].shape[1] :].numel()
        emitted = sum(trace.num_accepted + (trace.next_token_id is not None) for trace in stats.traces)
        assert stats.tokens == emitted + len(found)
        assert stats.rounds == len(stats.traces)
        assert sum(stats.accepted.values()) == sum(trace.num_accepted for trace in stats.traces)
