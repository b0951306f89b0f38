"""The loop: many requests in few slots, each as if it were alone; rounds, slots and counts."""

import copy

import pytest
import torch
from transformers import (
    StoppingCriteria,
)

from hf_specgen import (
    CacheLimits,
    CausalLMDrafter,
    Decoder,
    DecodingStats,
    FrequencyPenalty,
    LogitBias,
    PromptLookupDrafter,
    Request,
)
from hf_specgen.layers.attention import GROUPED_ATTENTION
from tests.support.decoding import WARPERS, make_requests, plain_text, prompt, rules, run
from tests.support.models import PAD, assert_partly_accepted, cycle_model, make_model, noisy_copy
from tests.support.processors import Fails


@pytest.fixture(scope="module")
def draft(llama):
    return noisy_copy(llama)


# Requests side by side


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft", "lookup", "plain"])
def test_request_in_company_equals_itself_alone(llama, draft, kind):
    drafters = {"draft": CausalLMDrafter(draft, 4), "lookup": PromptLookupDrafter(4), "plain": None}
    together, alone = make_requests(2), make_requests(2)
    stats = run(llama, drafters[kind], together)
    for request in alone:
        run(llama, drafters[kind], [request], slots=1)
    for number, (request, other) in enumerate(zip(together, alone, strict=True)):
        assert (number, request.token_ids) == (number, other.token_ids)
        assert request.finish_reason == other.finish_reason
        if request.rules.do_sample:
            continue
        if request.rules.logits_processor and getattr(request.rules.logits_processor[0], "scope", "") == "generated":
            continue  # plain `generate` would need the prompt's length
        assert (number, request.token_ids) == (number, plain_text(llama, request))
    greedy = [request for request in together if not request.rules.do_sample]
    assert {request.finish_reason for request in greedy} == {"length", "eos", "criteria"}
    if kind == "plain":
        assert stats.drafting_rounds == 0
    else:
        assert_partly_accepted(stats)


def test_sampled_text_depends_on_its_own_seed_only(llama, draft):
    def sampled(seed, company):
        request = Request(prompt(5, 0), 24, rules(*WARPERS, do_sample=True), seed)
        others = [Request(prompt(3, 9), 24, rules(*WARPERS, do_sample=True), 77) for _ in range(company)]
        stats = run(llama, CausalLMDrafter(draft, 3), [*others, request])
        return request.token_ids, stats

    (first, stats), (second, _), (other, _) = sampled(1, 0), sampled(1, 2), sampled(2, 2)
    assert first == second != other
    assert_partly_accepted(stats)


def test_request_without_a_seed_follows_the_default_generator(llama):
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        request = Request(prompt(5, 0), 24, rules(*WARPERS, do_sample=True))
        run(llama, None, [request])
        texts.append(request.token_ids)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("kind", ["raises", "masks"])
def test_failure_of_a_request_is_its_own(llama, draft, kind):
    requests, expected = make_requests(), make_requests()
    failing = [
        Request(prompt(4, 50), 20, rules(Fails(0, kind))),
        Request(prompt(4, 51), 20, rules(LogitBias({5: 1.0}), Fails(9, kind))),
        Request(prompt(4, 52), 20, rules(Fails(7, kind), do_sample=True), 3),
    ]
    mixed = [*requests[:2], failing[0], *requests[2:5], failing[1], *requests[5:], failing[2]]
    stats = run(llama, CausalLMDrafter(draft, 4), mixed)
    for request in expected:
        run(llama, CausalLMDrafter(draft, 4), [request], slots=1)
    assert [r.token_ids for r in requests] == [r.token_ids for r in expected]
    assert [r.finish_reason for r in requests] == [r.finish_reason for r in expected]
    for request in failing:
        assert request.finish_reason == "error"
        words = "no luck" if kind == "raises" else "`Fails` masked"
        assert words in str(request.error)
    assert len(failing[0].token_ids) == 0 and 0 < len(failing[1].token_ids) <= 5
    biased = Request(failing[1].prompt_ids, 20, rules(LogitBias({5: 1.0})))
    assert failing[1].token_ids == plain_text(llama, biased)[: len(failing[1].token_ids)]
    assert_partly_accepted(stats)


def test_failing_stopping_criterion_ends_its_request_only(llama):
    class Broken(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise RuntimeError("no luck")

    good, bad = Request(prompt(4, 1), 8), Request(prompt(4, 2), 8, rules(criteria=[Broken()]))
    run(llama, PromptLookupDrafter(), [bad, good])
    assert bad.finish_reason == "error" and "no luck" in str(bad.error)
    assert good.token_ids == plain_text(llama, good)


def test_more_requests_than_slots_keep_their_own_results(llama):
    requests = [Request(prompt(1 + index % 7, index), 5 + index % 4) for index in range(23)]
    stats = run(llama, PromptLookupDrafter(3), requests, slots=4)
    for request in requests:
        assert request.token_ids == plain_text(llama, request)
    assert_partly_accepted(stats)


@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_plain_decoding_equals_generate(family, slots):
    model = make_model(family)
    requests = [Request(prompt(1 + 2 * index % 9, index), 4 + 3 * index) for index in range(6)]
    stats = run(model, None, requests, slots=slots)
    for request in requests:
        assert request.token_ids == plain_text(model, request)
    assert stats.draft_forwards == stats.drafting_rounds == 0


# Slots and rounds


def test_slots_fill_again_as_requests_leave(llama, draft):
    requests = [Request(prompt(3, index), 2 + 5 * (index % 3)) for index in range(11)]
    decoder = Decoder(llama, CausalLMDrafter(draft, 3), max_batch_size=4)
    for progressed in decoder.run(requests):
        num_active = len(decoder._scheduler.active)
        num_unfinished = sum(request.finish_reason is None for request in requests)
        # Who left in this round is replaced at the beginning of the next one.
        num_done_now = sum(request.finish_reason is not None for request in progressed)
        assert num_active + num_done_now >= min(4, num_unfinished)
    assert decoder.rows.requests == [None] * 4
    assert decoder.rows.cache.lengths.tolist() == decoder.rows.draft_cache.lengths.tolist() == [0] * 4
    assert not decoder.has_unfinished


def test_request_added_between_rounds_is_decoded(llama, draft):
    early, late = Request(prompt(5, 1), 20), Request(prompt(9, 2), 20)
    decoder = Decoder(llama, CausalLMDrafter(draft, 3), max_batch_size=2)
    rounds = decoder.run([early])
    for _ in range(3):
        next(rounds)
    assert early.finish_reason is None
    decoder.add(late)
    for progressed in rounds:
        assert progressed
    for request in (early, late):
        assert request.token_ids == plain_text(llama, request)
    assert_partly_accepted(decoder.stats)


def test_batch_takes_no_more_passes_than_its_slowest_row(llama, draft):
    def requests():
        return [Request(prompt(1 + index, index), 10 + 5 * index) for index in range(8)]

    together = requests()
    stats = run(llama, CausalLMDrafter(draft, 4), together, slots=8)
    alone = [run(llama, CausalLMDrafter(draft, 4), [request], slots=1) for request in requests()]
    assert len({single.target_forwards for single in alone}) > 3
    assert stats.target_forwards <= max(single.target_forwards for single in alone)
    assert stats.tokens == sum(single.tokens for single in alone)
    assert_partly_accepted(stats)


def test_caches_hold_all_committed_tokens_but_the_last(llama, draft):
    decoder = Decoder(llama, CausalLMDrafter(draft, 4), max_batch_size=3)
    lags, lengths_differ = set(), False
    for _ in decoder.run(make_requests()):
        placed = [(slot, request) for slot, request in enumerate(decoder.rows.requests) if request is not None]
        for slot, request in placed:
            committed = request.num_committed
            assert decoder.rows.cache.lengths[slot] == committed - 1 if request.token_ids else True
            lag = committed - 1 - decoder.rows.draft_cache.lengths[slot].item()
            assert lag >= 0
            lags.add(lag)
        lengths_differ |= len({request.num_committed for _, request in placed}) > 1
    assert lengths_differ and {0, 1} <= lags, "the draft cache lags after a block that was accepted whole"
    assert_partly_accepted(decoder.stats)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_is_grouped_during_a_run_only(attention):
    model = make_model(attn_implementation=attention)
    draft = noisy_copy(model)
    requests = [Request(prompt(4, index), 20) for index in range(3)]
    decoder = Decoder(model, CausalLMDrafter(draft, 3))
    rounds = decoder.run(requests)
    next(rounds)
    expected = GROUPED_ATTENTION if attention == "sdpa" else "eager"
    assert model.config._attn_implementation == draft.config._attn_implementation == expected
    rounds.close()
    assert model.config._attn_implementation == draft.config._attn_implementation == attention
    for _ in decoder.run([]):  # goes on where it was left
        pass
    for request in requests:
        assert request.token_ids == plain_text(model, request)
    assert_partly_accepted(decoder.stats)


def test_fixed_capacity_gives_the_same_tokens(llama, draft):
    requests, fixed = make_requests(), make_requests()
    run(llama, CausalLMDrafter(draft, 4), requests)
    run(llama, CausalLMDrafter(draft, 4), fixed, limits=CacheLimits(capacity=96))
    assert [request.token_ids for request in fixed] == [request.token_ids for request in requests]
    with pytest.raises(ValueError, match="`capacity` of 8"):
        run(llama, None, [Request(prompt(4, 0), 20)], limits=CacheLimits(capacity=8))


def test_scores_of_a_request_have_one_entry_per_token(llama, draft):
    sharp = rules(FrequencyPenalty(1.0), eos_token_ids=frozenset([28, 60]))
    requests = [Request(prompt(4, index), 20, sharp, keep_scores=True, keep_logits=True) for index in range(4)]
    stats = run(llama, CausalLMDrafter(draft, 4), requests)
    for request in requests:
        assert len(request.scores) == len(request.logits) == len(request.token_ids)
        assert [scores.argmax().item() for scores in request.scores] == request.token_ids
        ids = torch.tensor([request.prompt_ids + request.token_ids[:-1]])
        with torch.no_grad():
            logits = llama(ids).logits[0, len(request.prompt_ids) - 1 :]
        torch.testing.assert_close(torch.stack(request.logits), logits, atol=1e-4, rtol=0)
    assert_partly_accepted(stats)


def test_peers_keep_an_idle_decoder_passing(llama):
    passes = []
    model = copy.deepcopy(llama)
    decoder = Decoder(model, PromptLookupDrafter(3))
    model.register_forward_pre_hook(lambda *args: passes.append(decoder.has_unfinished))
    request = Request(prompt(4, 0), 6)
    answers = iter([True] * 10 + [False])
    asked = []

    def has_unfinished_peers(is_busy):
        asked.append(is_busy)
        return next(answers)

    for _ in decoder.run([request], has_unfinished_peers):
        pass
    assert len(passes) == 10 and len(asked) == 11
    assert False in passes and asked == sorted(asked, reverse=True)
    assert request.token_ids == plain_text(llama, request)


# Counts


def test_counts_add_up(llama, draft):
    requests = make_requests(2)
    passes, draft_passes = [], []
    target, own_draft = copy.deepcopy(llama), copy.deepcopy(draft)
    decoder = Decoder(target, CausalLMDrafter(own_draft, 4), max_batch_size=3, trace=True)
    target.register_forward_pre_hook(lambda *args: passes.append(1))
    own_draft.register_forward_pre_hook(lambda *args: draft_passes.append(1))
    for _ in decoder.run(requests):
        pass
    stats = decoder.stats
    assert stats.tokens == sum(len(request.token_ids) for request in requests)
    assert stats.target_forwards == len(passes)
    assert stats.draft_forwards == len(draft_passes)
    # Each row gets one token from its prefill, then what its rounds emit.
    assert stats.tokens == len(requests) + sum(len(emitted(trace)) for trace in stats.traces)
    assert stats.rounds == len(stats.traces)
    assert stats.drafting_rounds == sum(len(trace.proposed) > 0 for trace in stats.traces)
    assert sum(stats.proposed.values()) == sum(len(trace.proposed) for trace in stats.traces)
    assert sum(stats.accepted.values()) == sum(trace.num_accepted for trace in stats.traces)
    assert set(stats.seconds) == {"draft", "verify", "processors", "other"} and min(stats.seconds.values()) > 0
    assert_partly_accepted(stats)


def emitted(trace):
    return [*trace.proposed[: trace.num_accepted]] + ([] if trace.next_token_id is None else [trace.next_token_id])


@pytest.mark.slow
def test_counts_of_two_runs_add_up_to_those_of_both(llama, draft):
    decoder = Decoder(llama, CausalLMDrafter(draft, 4), max_batch_size=3)
    parts = [run(llama, CausalLMDrafter(draft, 4), make_requests()) for _ in range(2)]
    for _ in range(2):
        for _ in decoder.run(make_requests()):
            pass
    total = sum(parts, DecodingStats())
    assert {**total.to_dict(), "seconds": None} == {**decoder.stats.to_dict(), "seconds": None}
    assert parts[0].tokens * 2 == total.tokens
    assert_partly_accepted(total)


def test_exact_counts_on_a_ring():
    ring = [(letter + 1) % 20 for letter in range(20)]
    wrong = [1, 2, 3, 4, 6, 5, *ring[6:]]  # after 4 comes 6, after 5 comes 5
    model, draft = cycle_model(ring), cycle_model(wrong)
    request = Request([0], 10)
    stats = run(model, CausalLMDrafter(draft, 3), [request])
    assert request.token_ids == list(range(1, 11))
    # Prefill 1; [2 3 4] + 5; [5 ..] refused: 6; [7 8 9] + 10, the last of the budget.
    assert stats.tokens == 10 and stats.rounds == stats.drafting_rounds == 3
    assert [stats.proposed[i] for i in range(3)] == [3, 3, 3]
    assert [stats.judged[i] for i in range(3)] == [3, 2, 2]
    assert [stats.accepted[i] for i in range(3)] == [2, 2, 2]
    assert stats.mean_accepted_length == 3.0 and stats.acceptance_rate == 6 / 7
    assert stats.conditional_acceptance == [2 / 3, 1, 1] and stats.survival == [2 / 3, 2 / 3, 2 / 3]
    assert stats.target_forwards == 4 and stats.draft_forwards == 9


def test_padding_id_in_a_prompt_is_a_token_like_others(llama):
    request = Request([PAD, PAD, 5, PAD, 7], 16)
    run(llama, None, [request])
    assert request.token_ids == plain_text(llama, request)
