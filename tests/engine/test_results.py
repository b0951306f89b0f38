"""Failures count only where decoding reaches them, and a decoder survives them."""

import copy

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_specgen import (
    CacheLimits,
    Candidates,
    CausalLMDrafter,
    Decoder,
    DecodingRules,
    PromptLookupDrafter,
    Request,
    enable_speculation,
)
from tests.support.models import PAD, left_padded, make_model, noisy_copy

PROMPT = 6


@pytest.fixture(scope="module")
def models():
    """The plain target, an enabled copy, and drafts: equal and noisy."""
    plain = make_model("llama")
    return plain, enable_speculation(copy.deepcopy(plain)), [copy.deepcopy(plain), noisy_copy(plain)]


@pytest.fixture(scope="module")
def batch():
    return left_padded([PROMPT])


@pytest.fixture(scope="module")
def text(models, batch):
    ids = models[0].generate(**batch, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    return ids[0, PROMPT:].tolist()


def assert_equal(models, batch, **kwargs):
    plain, ours, drafts = models
    expected = plain.generate(**batch, max_new_tokens=12, do_sample=False, **kwargs).tolist()
    for draft in drafts:
        assert (
            ours.generate(**batch, max_new_tokens=12, do_sample=False, assistant_model=draft, **kwargs).tolist()
            == expected
        )
    assert (
        ours.generate(**batch, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4, **kwargs).tolist()
        == expected
    )


class RaisesOff(LogitsProcessor):
    """Knows the greedy text only."""

    def __init__(self, text):
        self.text = text

    def __call__(self, input_ids, scores):
        generated = input_ids[0, PROMPT:].tolist()
        if generated != self.text[: len(generated)]:
            raise RuntimeError("off the path")
        return scores


class AfterEos(LogitsProcessor):
    def __init__(self, eos, is_raising):
        self.eos, self.is_raising = eos, is_raising

    def __call__(self, input_ids, scores):
        if self.eos not in input_ids[0, PROMPT:].tolist():
            return scores
        if self.is_raising:
            raise RuntimeError("after the end")
        return torch.full_like(scores, -torch.inf)


def test_prefix_function_that_allows_nothing_after_eos(models, batch, text):
    eos = text[4]
    allowed = lambda row, ids: [] if eos in ids.tolist()[PROMPT:] else list(range(64))  # noqa: E731
    assert_equal(models, batch, eos_token_id=eos, prefix_allowed_tokens_fn=allowed)


@pytest.mark.parametrize("is_raising", [False, True])
def test_processor_that_fails_after_eos(models, batch, text, is_raising):
    assert_equal(models, batch, eos_token_id=text[4], logits_processor=[AfterEos(text[4], is_raising)])


def test_processor_that_raises_on_what_greedy_never_writes(models, batch, text):
    assert_equal(models, batch, eos_token_id=None, pad_token_id=PAD, logits_processor=[RaisesOff(text)])


def test_later_processor_may_revive_what_an_earlier_one_forbade(models, batch):
    class Force(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == PROMPT + 3:
                scores = torch.full_like(scores, -torch.inf)
                scores[:, 63] = 0.0
            return scores

    class Floor(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.clamp(min=-1e4)

    for processors in ([Force()], [Force(), Floor()]):
        assert_equal(
            models, batch, prefix_allowed_tokens_fn=lambda row, ids: list(range(3, 60)), logits_processor=processors
        )


def test_criterion_is_not_asked_behind_the_stop_of_another(models, batch):
    class Stops(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= PROMPT + 3)

    class Raises(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] > PROMPT + 3:
                raise RuntimeError("behind the stop")
            return torch.tensor(False)  # broadcasts, as in plain generate

    for criteria in ([Stops(), Raises()], [Raises(), Stops()]):
        assert_equal(models, batch, stopping_criteria=StoppingCriteriaList(criteria))


def test_criterion_sees_the_scores_where_they_are_kept(models, batch):
    class FourScores(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), len(scores) >= 4)

    plain, ours, drafts = models
    kwargs = {"max_new_tokens": 9, "return_dict_in_generate": True, "output_scores": True, "do_sample": False}
    kwargs["stopping_criteria"] = StoppingCriteriaList([FourScores()])
    expected = plain.generate(**batch, **kwargs)
    assert torch.equal(ours.generate(**batch, **kwargs, assistant_model=drafts[0]).sequences, expected.sequences)


def test_failure_that_decoding_reaches_is_raised_once_it_does(models, batch):
    class Cancelled(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            if self.calls == 3:
                raise RuntimeError("client cancelled")
            return scores

    _, ours, drafts = models
    with pytest.raises(RuntimeError, match="client cancelled"):
        ours.generate(**batch, max_new_tokens=12, prompt_lookup_num_tokens=3, logits_processor=[Cancelled()])


def test_request_ends_with_the_tokens_before_its_failure(models, text):
    plain, _, drafts = models
    prompt = left_padded([PROMPT])["input_ids"][0].tolist()
    rules = DecodingRules(LogitsProcessorList([AfterEos(text[4], True)]))
    requests = [Request(prompt, 12, rules), Request(prompt, 12)]
    for _ in Decoder(copy.deepcopy(plain), CausalLMDrafter(drafts[0])).run(requests):
        pass
    assert requests[0].finish_reason == "error" and "after the end" in str(requests[0].error)
    assert requests[0].token_ids == text[:5] and requests[1].token_ids == text


@pytest.mark.parametrize("failing_round", [1, 2, 4])
def test_decoder_goes_on_after_an_exception(models, text, failing_round):
    plain, _, drafts = models
    prompt = left_padded([PROMPT])["input_ids"][0].tolist()
    rounds = []

    def on_round(*_):
        rounds.append(None)
        if len(rounds) == failing_round:
            raise KeyboardInterrupt

    decoder = Decoder(copy.deepcopy(plain), CausalLMDrafter(drafts[1]), max_batch_size=2, on_round=on_round)
    requests = [Request(prompt, 12), Request(prompt[:3], 5), Request(prompt, 12)]
    with pytest.raises(KeyboardInterrupt):
        list(decoder.run(requests))
    list(decoder.run([]))
    assert [r.finish_reason for r in requests] == ["length"] * 3
    assert requests[0].token_ids == requests[2].token_ids == text


def test_idle_decoder_steps_without_harm(models):
    assert Decoder(copy.deepcopy(models[0])).step() == []


def test_request_given_twice_is_refused(models):
    request = Request([5, 6], 3)
    with pytest.raises(ValueError, match="twice"):
        Decoder(copy.deepcopy(models[0])).add(request, request)


@pytest.mark.parametrize(
    "rules",
    [
        {"eos_token_ids": 2},
        {"logits_processor": AfterEos(1, False)},
        {"stopping_criteria": ["junk"]},
        {"do_sample": "no"},
    ],
)
def test_rules_of_wrong_types_are_refused(rules):
    with pytest.raises(TypeError, match=f"`{next(iter(rules))}` has to be"):
        DecodingRules(**rules)


def test_budget_costs_nothing_before_it_is_used():
    request = Request([1, 2], 2_000_000_000, DecodingRules(LogitsProcessorList([AfterEos(1, False)])))
    assert request.batch.token_ids.numel() == 2


def test_kept_scores_hold_no_more_than_themselves(models):
    plain, _, drafts = models
    request = Request([5, 6, 7], 9, keep_scores=True, keep_logits=True)
    list(Decoder(copy.deepcopy(plain), CausalLMDrafter(drafts[0])).run([request, Request([5], 9)]))
    storages = {s.untyped_storage().data_ptr(): s.untyped_storage().nbytes() for s in request.scores}
    assert sum(storages.values()) == len(request.scores) * 64 * 4


def test_capacity_does_not_make_seeds_depend_on_neighbours(models):
    plain, _, drafts = models
    sampled = DecodingRules(do_sample=True)

    def run(has_neighbour):
        request = Request([9, 8, 7], 20, sampled, seed=7)
        decoder = Decoder(copy.deepcopy(plain), CausalLMDrafter(drafts[1]), max_batch_size=2, limits=CacheLimits(39))
        if has_neighbour:
            decoder.add(Request(list(range(3, 12)), 30, sampled, seed=1))
            for _ in range(9):
                decoder.step()
        decoder.add(request)
        while decoder.has_unfinished:
            decoder.step()
        return request.token_ids

    assert run(True) == run(False)


class Badly(PromptLookupDrafter):
    """Returns what a mistaken drafter may return."""

    def __init__(self, make):
        super().__init__(3)
        self.make = make

    def draft(self, rows, max_tokens):
        return self.make(rows.num_spanned)


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: Candidates(torch.zeros(rows, 2), torch.full((rows,), 2)),
        lambda rows: Candidates(torch.zeros(rows, 2, dtype=torch.long), torch.full((rows,), 2.0)),
        lambda rows: Candidates(torch.zeros(rows + 1, 2, dtype=torch.long), torch.full((rows + 1,), 2)),
        lambda rows: Candidates(torch.zeros(rows, 50, dtype=torch.long), torch.full((rows,), 50)),
    ],
    ids=["float ids", "float lengths", "too many rows", "more than max_tokens"],
)
def test_block_that_does_not_fit_is_refused_in_a_sentence(models, batch, make):
    with pytest.raises(ValueError, match="has to"):
        models[1].generate(**batch, max_new_tokens=12, assistant_model=Badly(make))
