"""Who waits, who sits next, and what of whose prompt each pass takes in; none of it changes a token."""

import functools
import random

import pytest
import torch

from hf_specgen import (
    CacheLimits,
    CausalLMDrafter,
    Decoder,
    DSparkDrafter,
    FrequencyPenalty,
    PromptLookupDrafter,
    Request,
)
from hf_specgen.engine.scheduler import CANDIDATE_COLUMNS, MIN_SHARED, SHORT_PROMPT
from hf_specgen.layers.slot_cache import SlotLayer
from tests.support.decoding import plain_text, prompt, rules, run
from tests.support.dspark_models import bigram_target, fitted_drafter
from tests.support.models import EOS, VOCAB_SIZE, assert_partly_accepted, make_model, noisy_copy

FAMILIES = ["llama", "qwen3", "mistral", "gemma3", "gpt2"]
KINDS = ["draft", "lookup", "dspark", "plain"]


@functools.cache
def target_of(family):
    """Attention counts for little in it, so that its DSpark drafter is right at times."""
    if family != "gpt2":
        return bigram_target(family)
    model = make_model(family)
    with torch.no_grad():
        for layer in model.transformer.h:
            layer.attn.c_proj.weight.mul_(0.04)
    return model


@functools.cache
def dspark_of(family):
    return fitted_drafter(target_of(family))


@functools.cache
def draft_of(family):
    return noisy_copy(target_of(family))


def drafter_of(family, kind):
    makers = {
        "draft": lambda: CausalLMDrafter(draft_of(family), 4),
        "lookup": lambda: PromptLookupDrafter(4),
        "dspark": lambda: DSparkDrafter(dspark_of(family)),
        "plain": lambda: None,
    }
    return makers[kind]()


@functools.cache
def expected_text(family, prompt_ids, budget):
    return plain_text(target_of(family), Request(list(prompt_ids), budget))


def assert_plain(family, *requests):
    for number, request in enumerate(requests):
        assert request.finish_reason == "length"
        expected = expected_text(family, tuple(request.prompt_ids), request.max_new_tokens)
        assert (number, request.token_ids) == (number, expected)


class Watched:
    """A decoder that keeps a list of what it does: passes over prompts, and "round"."""

    def __init__(self, family="llama", kind="plain", slots=4, trace=False, **limits):
        self.decoder = Decoder(target_of(family), drafter_of(family, kind), slots, CacheLimits(**limits), trace=trace)
        self.scheduler = self.decoder._scheduler
        self.events = []
        next_pass, one_round = self.scheduler.next_pass, self.decoder._round

        def watched_pass():
            self.events.append(next_pass())
            return self.events[-1]

        def watched_round():
            self.events.append("round")
            return one_round()

        self.scheduler.next_pass, self.decoder._round = watched_pass, watched_round

    @property
    def passes(self):
        return [event for event in self.events if event != "round"]

    @property
    def num_fed(self):
        return sum(len(tokens) for event in self.passes for tokens in event.token_lists)

    def finish(self, *requests):
        self.decoder.add(*requests)
        while self.decoder.has_unfinished:
            self.decoder.step()
        return self


# Chunks


def chunked_requests():
    """Two that decode from the start, then long ones."""
    lengths = [(3, 40), (5, 36), (70, 12), (33, 16), (41, 9), (2, 20), (90, 5)]
    return [Request(prompt(length, seed=7 * length), budget) for length, budget in lengths]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_in_chunks_gives_the_text_of_plain_generate(family, kind):
    requests = chunked_requests()
    watched = Watched(family, kind, slots=3, prefill_chunk_size=11).finish(*requests)
    assert_plain(family, *requests)
    assert sum(not event.is_last for event in watched.passes) > 5
    first, last = watched.events.index("round"), len(watched.events) - watched.events[::-1].index("round")
    assert any(event != "round" for event in watched.events[first:last]), "no prompt came in during the rounds"
    if kind == "plain":
        assert watched.decoder.stats.drafting_rounds == 0
    else:
        assert_partly_accepted(watched.decoder.stats)


@pytest.mark.parametrize("kind", ["draft", "dspark"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_candidates_do_not_depend_on_the_chunks(family, kind):
    """For a DSpark drafter: the hidden states of all chunks arrive, each at its place."""

    def proposed(chunk, slots):
        requests = chunked_requests()
        watched = Watched(family, kind, slots, trace=True, prefill_chunk_size=chunk).finish(*requests)
        traces = watched.decoder.stats.traces
        return [[(t.proposed, t.num_accepted) for t in traces if t.row == row] for row in range(len(requests))]

    chunked = proposed(11, slots=3)
    assert chunked == proposed(512, slots=1)
    assert any(accepted not in (0, len(tokens)) for row in chunked for tokens, accepted in row)


@pytest.mark.parametrize("chunk", [1, 8, 16])
def test_rows_that_decode_wait_for_a_chunk_of_a_prompt_at_most(chunk):
    early, long = Request(prompt(3, 1), 120), Request(prompt(81, 2), 4)
    watched = Watched(prefill_chunk_size=chunk)
    watched.decoder.add(early)
    for _ in range(2):
        watched.decoder.step()
    watched.events.clear()
    watched.finish(long)
    joined = [event for event in watched.events[: watched.events.index("round")] if event != "round"]
    assert [len(event.token_lists[0]) for event in joined] == [chunk]
    num_passes = -(-81 // chunk)
    turns = ["round" if event == "round" else "pass" for event in watched.events]
    assert turns == ["pass", "round"] * num_passes + ["round"] * (118 - num_passes)
    assert [event.is_last for event in watched.passes] == [False] * (num_passes - 1) + [True]
    assert_plain("llama", early, long)


def test_short_prompts_go_in_one_after_the_other_up_to_a_chunk():
    """Newcomers that do not sit together, since the slots between them are taken."""
    staying = [Request(prompt(2, seed), 60 if seed % 2 else 4) for seed in range(6)]
    coming = [Request(prompt(10, 20 + seed), 9) for seed in range(3)]
    watched = Watched(slots=6, prefill_chunk_size=16)
    watched.decoder.add(*staying)
    while any(request.finish_reason is None for request in staying[::2]):
        watched.decoder.step()
    watched.events.clear()
    watched.finish(*coming)
    turns = ["round" if event == "round" else event.span.start for event in watched.events]
    assert turns[:5] == [0, 2, "round", 4, "round"]
    assert_plain("llama", *staying, *coming)


def test_nobody_waits_for_a_chunk_when_nobody_decodes():
    request = Request(prompt(100, 3), 3)
    watched = Watched(prefill_chunk_size=8).finish(request)
    assert [len(event.token_lists[0]) for event in watched.passes] == [100]


# Newcomers of about one length go together


@pytest.mark.parametrize("seed", range(6))
def test_padding_is_bounded(seed):
    generator = random.Random(seed)
    lengths = [generator.choice([1, 3, 20, 60, 70, 110, 150, 200]) for _ in range(24)]
    requests = [Request(prompt(length, 300 * seed + i), 2) for i, length in enumerate(lengths)]
    watched = Watched(slots=8).finish(*requests)
    assert any(len(event.token_lists) > 2 for event in watched.passes)
    for event in watched.passes:
        counts = [len(tokens) for tokens in event.token_lists]
        assert max(counts) <= max(2 * min(counts), SHORT_PROMPT)
    assert watched.num_fed == sum(lengths)
    assert_plain("llama", *requests)


def test_newcomers_of_one_length_take_one_pass():
    watched = Watched(slots=8).finish(*[Request(prompt(100 + seed, seed), 2) for seed in range(8)])
    assert [event.span for event in watched.passes] == [slice(0, 8)]


def shared_and_not():
    """A row to copy from; one that lacks 80 tokens behind 100 copied ones; one that lacks 160, and copies nothing."""
    shared = prompt(100, 0)
    first = Request([*shared, 5], 30)
    return first, [Request([*shared, *prompt(80, 1)], 2), Request(prompt(160, 2), 2)]


def test_padding_stays_within_the_columns_of_a_fixed_cache():
    first, others = shared_and_not()
    watched = Watched(capacity=182)
    watched.decoder.add(first)
    watched.decoder.step()
    watched.finish(*others)
    assert_plain("llama", first, *others)


def test_padding_stays_within_the_bound():
    first, others = shared_and_not()
    most = 3 * (182 + CANDIDATE_COLUMNS)
    watched = Watched(slots=3, max_tokens_in_cache=most)
    watched.decoder.add(first)
    watched.decoder.step()
    watched.decoder.add(*others)
    while watched.decoder.has_unfinished:
        watched.decoder.step()
        assert num_allocated(watched.decoder) <= most
    assert_plain("llama", first, *others)


# Shared beginnings


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_a_prompt_share_its_prefill(kind):
    requests = [Request(prompt(40, 1), 12) for _ in range(5)]
    watched = Watched("llama", kind, slots=5).finish(*requests)
    assert watched.num_fed == 40 + 4
    assert_plain("llama", *requests)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_common_beginning_is_computed_once_while_one_of_its_prompts_is_sloted(family, kind):
    system = prompt(48, 2)
    requests = [Request([*system, *prompt(5, 10 + i)], 8 + 3 * i) for i in range(9)]
    watched = Watched(family, kind, slots=3, prefill_chunk_size=13).finish(*requests)
    assert watched.num_fed == 48 + 9 * 5
    assert_plain(family, *requests)
    if kind != "plain":
        assert_partly_accepted(watched.decoder.stats)


@pytest.mark.parametrize(("num_common", "is_copied"), [(MIN_SHARED - 1, False), (MIN_SHARED, True)])
def test_beginnings_that_are_too_short_are_computed_again(num_common, is_copied):
    common = prompt(num_common, 3)
    requests = [Request([*common, 5, *prompt(9, 1)], 4), Request([*common, 6, *prompt(9, 2)], 4)]
    watched = Watched(slots=2).finish(*requests)
    assert watched.num_fed == 2 * (num_common + 10) - (num_common if is_copied else 0)
    assert_plain("llama", *requests)


def test_what_was_generated_is_not_shared():
    """The second prompt is the first with its answer: only the prompts' own beginning is looked at."""
    first = Request(prompt(20, 4), 40)
    watched = Watched(slots=2)
    watched.decoder.add(first)
    for _ in range(10):
        watched.decoder.step()
    second = Request([*first.prompt_ids, *first.token_ids], 10)
    watched.events.clear()
    watched.finish(second)
    assert watched.num_fed == len(second.prompt_ids) - 20
    assert_plain("llama", first, second)


def test_longest_common_beginning_is_taken():
    base = prompt(60, 5)
    requests = [Request(base[:20] + [3] * 5, 30), Request(base[:40] + [4] * 5, 30), Request([*base, 7], 5)]
    watched = Watched(slots=3)
    for request in requests:
        watched.decoder.add(request)
        watched.decoder.step()
    watched.finish()
    assert [sum(map(len, event.token_lists)) for event in watched.passes] == [25, 25, 21]
    assert_plain("llama", *requests)


@pytest.mark.parametrize("kind", ["draft", "dspark", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_copied_keys_and_values_equal_computed_ones(family, kind):
    system = prompt(30, 6)
    first, second = Request([*system, 5, 6], 25), Request([*system, 9, 8, 7], 25)
    watched = Watched(family, kind, slots=2)
    watched.decoder.add(first)
    for _ in range(4):
        watched.decoder.step()
    watched.decoder.add(second)
    while len(second.token_ids) < 4:
        watched.decoder.step()
    assert watched.num_fed == 32 + 3
    alone = Watched(family, kind, slots=1)
    alone.decoder.add(Request(second.prompt_ids, 25))
    while int(alone.decoder.rows.cache.lengths[0]) < second.num_committed - 1:
        alone.decoder.step()
    for cache, other in zip(watched.decoder.rows.caches(), alone.decoder.rows.caches(), strict=True):
        length = min(int(cache.lengths[1]), int(other.lengths[0]))
        assert length >= 33
        for layer, own in zip(cache.layers, other.layers, strict=True):
            for name in ("keys", "values"):
                found, expected = getattr(layer, name)[1, :, :length], getattr(own, name)[0, :, :length]
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_beginning_of_a_leader_that_was_aborted_is_computed_by_the_next(kind):
    decoding = Request(prompt(3, 7), 60)
    system = prompt(40, 8)
    leader, *followers = [Request([*system, *prompt(4, 20 + i)], 10) for i in range(4)]
    watched = Watched("llama", kind, slots=5, prefill_chunk_size=8)
    watched.decoder.add(decoding)
    watched.decoder.step()
    watched.decoder.add(leader, *followers)
    for _ in range(5):
        watched.decoder.step()
    slot = next(slot for slot, request in watched.scheduler.prefilling.items() if request is leader)
    assert 0 < watched.decoder.rows.cache.lengths[slot] < 40
    watched.decoder.abort(leader)
    watched.events.clear()
    watched.finish()
    assert watched.num_fed == 40 + 3 * 4
    assert leader.finish_reason == "aborted" and leader.token_ids == []
    assert_plain("llama", decoding, *followers)


def test_follower_of_a_leader_that_decodes_and_leaves_keeps_its_copy():
    system = prompt(40, 9)
    first, second = Request([*system, 5], 2), Request([*system, 6], 20)
    third = Request(prompt(20, 1), 15)  # sits down in the first one's slot
    watched = Watched(slots=2).finish(first, second, third)
    assert watched.num_fed == 41 + 1 + 20
    assert_plain("llama", first, second, third)


def test_draft_cache_that_lags_behind_is_copied_as_far_as_it_goes():
    """The draft model reads a prompt when it first drafts: the second one joins before, the third one after."""
    system = prompt(40, 10)
    requests = [Request([*system, 5 + i], 20) for i in range(3)]
    watched = Watched("llama", "draft", slots=3)
    watched.decoder.add(requests[0])
    watched.decoder.step()
    assert watched.decoder.rows.draft_cache.lengths.tolist() == [0, 0, 0]
    watched.decoder.add(requests[1])
    watched.decoder.step()
    assert watched.decoder.rows.draft_cache.lengths.tolist() == [0, 0, 0]
    watched.decoder.step()
    watched.decoder.add(requests[2])
    watched.decoder.step()
    assert watched.decoder.rows.draft_cache.lengths[2] == 40
    watched.finish()
    assert watched.num_fed == 41 + 1 + 1
    assert_plain("llama", *requests)
    assert_partly_accepted(watched.decoder.stats)


# A bound on the cache


def num_allocated(decoder, caches=slice(0, 1)):
    """Columns of the largest buffers over all rows."""
    layers = [
        layer for cache in decoder.rows.caches()[caches] for layer in cache.layers if isinstance(layer, SlotLayer)
    ]
    return max((layer.keys.shape[0] * layer.keys.shape[2] for layer in layers if layer.is_initialized), default=0)


def bounded_requests(seed, count=16):
    generator = random.Random(seed)
    system = prompt(30, seed)
    return [
        Request([*(system if generator.random() < 0.4 else []), *prompt(generator.randint(1, 90), i)], budget)
        for i, budget in enumerate(generator.choices([1, 3, 10, 30], k=count))
    ]


@pytest.mark.parametrize("most", [230, 300, 700, 1100])
@pytest.mark.parametrize("kind", ["draft", "lookup", "plain"])
def test_cache_never_outgrows_the_bound_and_everyone_finishes(kind, most):
    requests = bounded_requests(most)
    watched = Watched("llama", kind, slots=6, prefill_chunk_size=32, max_tokens_in_cache=most)
    watched.decoder.add(*requests)
    largest, most_sloted = 0, 0
    while watched.decoder.has_unfinished:
        watched.decoder.step()
        largest = max(largest, num_allocated(watched.decoder))
        most_sloted = max(most_sloted, len(watched.scheduler.active))
        assert largest <= most
    assert largest > most / 3, "the bound is far away"
    assert most_sloted > 1 or most < 300
    assert_plain("llama", *requests)


def test_cache_of_a_draft_model_is_as_long_as_the_targets():
    requests = [Request(prompt(80, seed), 100) for seed in range(4)]
    most = 2 * (180 + CANDIDATE_COLUMNS)
    watched = Watched("llama", "draft", slots=4, max_tokens_in_cache=most)
    watched.decoder.add(*requests)
    while watched.decoder.has_unfinished:
        watched.decoder.step()
        assert num_allocated(watched.decoder, slice(1, 2)) <= most


def test_requests_wait_for_room_in_their_order():
    requests = [Request(prompt(20, seed), 10) for seed in range(6)]
    watched = Watched(slots=4, max_tokens_in_cache=2 * (30 + CANDIDATE_COLUMNS))
    watched.decoder.add(*requests)
    begun = []
    while watched.decoder.has_unfinished:
        watched.decoder.step()
        assert len(watched.scheduler.active) <= 2
        begun += [i for i, request in enumerate(requests) if request.token_ids and i not in begun]
    assert begun == list(range(6))
    assert_plain("llama", *requests)


def test_long_request_gets_the_memory_that_many_short_ones_had():
    """Four rows of 89 columns, then one row that needs nearly all of it."""
    most = 400
    short = [Request(prompt(20, seed), 5) for seed in range(4)]
    long = Request(prompt(190, 9), 30)
    watched = Watched(slots=4, max_tokens_in_cache=most).finish(*short)
    assert num_allocated(watched.decoder) > most - (220 + CANDIDATE_COLUMNS)
    watched.decoder.add(long, *[Request(prompt(20, 20 + seed), 5) for seed in range(2)])
    while watched.decoder.has_unfinished:
        watched.decoder.step()
        assert num_allocated(watched.decoder) <= most
    assert_plain("llama", long)


def test_request_that_cannot_fit_alone_is_refused():
    decoder = Watched(max_tokens_in_cache=100).decoder
    with pytest.raises(ValueError, match="need 101 columns, but `max_tokens_in_cache` is 100"):
        decoder.add(Request(prompt(20, 0), 101 - 20 - CANDIDATE_COLUMNS))
    fits = Request(prompt(20, 0), 100 - 20 - CANDIDATE_COLUMNS)
    assert not decoder.has_unfinished
    decoder.add(fits)
    while decoder.has_unfinished:
        decoder.step()
    assert_plain("llama", fits)


def test_one_that_is_refused_leaves_its_company_out_too():
    decoder = Watched(max_tokens_in_cache=200).decoder
    fits = Request(prompt(20, 0), 10)
    with pytest.raises(ValueError):
        decoder.add(fits, Request(prompt(20, 0), 200))
    assert not decoder.has_unfinished and fits.number == -1
    decoder.add(fits)


@pytest.mark.parametrize("kind", ["draft", "dspark", "plain"])
def test_memory_is_given_back_when_idle(kind):
    requests = chunked_requests()
    watched = Watched("llama", kind, slots=3).finish(*requests)
    assert num_allocated(watched.decoder, slice(0, 2)) > 0
    watched.decoder.release()
    assert num_allocated(watched.decoder, slice(0, 2)) == 0
    assert all(layer.keys.numel() == 0 for cache in watched.decoder.rows.caches() for layer in cache.layers)
    again = chunked_requests()
    watched.finish(*again)
    assert_plain("llama", *again)


def test_largest_blocks_stay_within_the_bound():
    requests = [Request([5] * 150, 10), Request([4] * 20, 130)]
    most = 2 * (160 + CANDIDATE_COLUMNS)
    decoder = Decoder(target_of("llama"), PromptLookupDrafter(63), 2, CacheLimits(max_tokens_in_cache=most))
    decoder.add(*requests)
    while decoder.has_unfinished:
        decoder.step()
        assert num_allocated(decoder) <= most


# Leaving early


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", ["waiting", "prefilling", "decoding", "done"])
def test_request_is_aborted_at_any_time(stage, kind):
    company = [Request(prompt(3, 1), 30), Request(prompt(4, 2), 30)]
    leaving, coming = Request(prompt(60, 3), 25), Request(prompt(9, 4), 12)
    watched = Watched("llama", kind, slots=2 if stage == "waiting" else 3, prefill_chunk_size=16)
    watched.decoder.add(*company)
    watched.decoder.step()
    watched.decoder.add(leaving)

    def is_there():
        return {
            "waiting": leaving in watched.scheduler.waiting.values(),
            "prefilling": leaving in watched.scheduler.prefilling.values(),
            "decoding": len(leaving.token_ids) > 2,
            "done": leaving.finish_reason is not None,
        }[stage]

    num_steps = 0
    while not is_there() or num_steps < 3:
        watched.decoder.step()
        num_steps += 1
    assert is_there()
    num_active = len(watched.scheduler.active)
    num_tokens = len(leaving.token_ids)
    watched.decoder.abort(leaving)
    watched.decoder.abort(leaving)
    assert leaving not in watched.scheduler.active and leaving not in watched.scheduler.waiting.values()
    assert len(watched.scheduler.active) == num_active - (stage in ("prefilling", "decoding"))
    assert leaving.finish_reason == ("length" if stage == "done" else "aborted")
    watched.finish(coming)
    assert_plain("llama", *company, coming)
    assert len(leaving.token_ids) == num_tokens
    assert leaving.token_ids == expected_text("llama", tuple(leaving.prompt_ids), 25)[:num_tokens]
    assert watched.decoder.rows.cache.lengths.tolist() == [0] * watched.decoder.rows.cache.num_rows


# A pass that fails


class Fault(Exception):
    pass


def fails_once(function, at):
    """`function`, but its call number `at` raises; before it does anything, or after."""
    calls = []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == at[0] and at[1] == "before":
            raise Fault
        result = function(*args, **kwargs)
        if len(calls) == at[0]:
            raise Fault
        return result

    return failing


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("kind", "place"),
    [("plain", "forward"), *((k, p) for k in KINDS if k != "plain" for p in ("forward", "observe", "draft"))],
)
def test_decoding_goes_on_after_a_pass_that_failed(monkeypatch, kind, place, when):
    """At each of the first passes in turn: the prompts' chunks and the rounds between them."""
    target = target_of("llama")
    num_failed = 0
    for at in (1, 2, 5, 8, 12):
        requests = [Request(prompt(3, 1), 30), Request(prompt(1, 5), 10), Request(prompt(50, 2), 9)]
        requests.append(Request([*requests[2].prompt_ids[:40], *prompt(9, 3)], 9))
        watched = Watched("llama", kind, slots=4, prefill_chunk_size=8)
        owner, name = {"forward": (target, "forward")}.get(place, (watched.decoder.drafter, place))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails_once(getattr(owner, name), (at, when)))
            watched.decoder.add(requests[0])
            to_come = requests[1:]
            while watched.decoder.has_unfinished or to_come:
                try:
                    watched.decoder.step()
                except Fault:
                    num_failed += 1
                if to_come:
                    watched.decoder.add(to_come.pop(0))
        assert_plain("llama", *requests)
        assert watched.decoder.rows.cache.lengths.tolist() == [0] * 4
    assert num_failed >= 4


def test_sampled_text_is_its_seeds_after_a_chunk_that_failed(monkeypatch):
    target = target_of("llama")

    def sampled():
        return Request(prompt(50, 2), 9, rules(FrequencyPenalty(0.5), do_sample=True), seed=3)

    expected, company, failed = sampled(), Request(prompt(3, 1), 30), sampled()
    run(target, None, [expected])
    watched = Watched(slots=2, prefill_chunk_size=8)
    watched.decoder.add(company)
    watched.decoder.step()
    watched.decoder.add(failed)
    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", fails_once(target.forward, (5, "after")))
        with pytest.raises(Fault):
            watched.finish()
    assert failed.token_ids == []
    watched.finish()
    assert failed.token_ids == expected.token_ids
    assert_plain("llama", company)


# Fixed capacity, and the order of a run


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_copies_in_a_cache_of_fixed_size(kind):
    requests = [*chunked_requests(), Request([*prompt(70, 490)[:60], 5], 20)]
    watched = Watched("llama", kind, slots=3, capacity=100, prefill_chunk_size=16).finish(*requests)
    assert_plain("llama", *requests)
    assert {layer.keys.shape[2] for layer in watched.decoder.rows.cache.layers} == {100 + CANDIDATE_COLUMNS}
    with pytest.raises(ValueError, match="101 tokens, but the cache has a `capacity` of 100"):
        watched.decoder.add(Request(prompt(81, 0), 20))


def test_run_gives_slots_to_the_largest_budgets_first():
    budgets = [5, 9, 9, 2, 14]
    requests = [Request(prompt(3, i), budget) for i, budget in enumerate(budgets)]
    decoder = Decoder(target_of("llama"), max_batch_size=1)
    begun = []
    for progressed in decoder.run(requests):
        begun += [requests.index(request) for request in progressed if len(request.token_ids) == 1]
    assert begun == [4, 1, 2, 0, 3]
    assert_plain("llama", *requests)


def test_step_gives_slots_in_the_order_of_arrival():
    requests = [Request(prompt(3, i), budget) for i, budget in enumerate([5, 9, 9, 2, 14])]
    decoder = Decoder(target_of("llama"), max_batch_size=2)
    decoder.add(*requests[:2])
    decoder.add(*requests[2:])
    begun = []
    while decoder.has_unfinished:
        begun += [requests.index(request) for request in decoder.step() if len(request.token_ids) == 1]
    assert begun == [0, 1, 2, 3, 4]
    assert decoder.step() == []


def test_eos_of_a_prompt_in_chunks_ends_it_with_its_first_token():
    text = expected_text("llama", tuple(prompt(50, 2)), 5)
    company = Request(prompt(3, 1), 30)
    ending = Request(prompt(50, 2), 5, rules(eos_token_ids=frozenset([EOS, text[0]])))
    watched = Watched(slots=2, prefill_chunk_size=8)
    watched.decoder.add(company)
    watched.decoder.step()
    watched.finish(ending)
    assert (ending.token_ids, ending.finish_reason) == (text[:1], "eos")
    assert_plain("llama", company)
    assert len(watched.passes) > 1


@pytest.mark.parametrize("field", ["capacity", "max_tokens_in_cache", "prefill_chunk_size"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_limits_that_are_no_counts_are_refused_by_name(field, value, error):
    with pytest.raises(error, match=f"^`{field}`"):
        CacheLimits(**{field: value})
    if field == "prefill_chunk_size":
        with pytest.raises(TypeError, match="^`prefill_chunk_size`"):
            CacheLimits(prefill_chunk_size=None)


def test_vocabulary_is_used():
    assert len({token for seed in range(30) for token in prompt(50, seed)}) == VOCAB_SIZE - 3
