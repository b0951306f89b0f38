"""Which request gets a slot next, and what of whose prompt each pass takes in; none of it changes a token."""

import random
from collections import OrderedDict

import pytest

from hf_specgen import (
    CacheLimits,
    Decoder,
    Request,
)
from hf_specgen.engine import decoder as decoder_module
from hf_specgen.engine.limits import CANDIDATE_COLUMNS
from hf_specgen.engine.scheduler import SHORT_PROMPT
from tests.support.decoding import prompt, rules
from tests.support.models import EOS, VOCAB_SIZE, assert_partly_accepted
from tests.support.scheduling import (
    FAMILIES,
    KINDS,
    Watched,
    assert_plain,
    chunked_requests,
    expected_text,
    num_allocated,
    target_of,
)

# Chunks


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
    """New requests that are not adjacent, since the slots between them are taken."""
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


# New requests of about one length go together


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


def test_new_requests_of_one_length_take_one_pass():
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


def test_vocabulary_is_used():
    assert len({token for seed in range(30) for token in prompt(50, seed)}) == VOCAB_SIZE - 3


class OnlyTheFirst(OrderedDict):
    """A queue of which nobody may look at more than the head."""

    def values(self):
        for number, value in enumerate(super().values()):
            assert number == 0, "the queue is walked"
            yield value

    def items(self):
        raise AssertionError("the queue is walked")

    def __iter__(self):
        raise AssertionError("the queue is walked")


def test_nothing_walks_the_queue(monkeypatch):
    """So adding, aborting and a round cost the same whatever waits."""
    sizes = []
    monkeypatch.setattr(decoder_module, "check_positions", lambda model, requests, role: sizes.append(len(requests)))
    decoder = Decoder(target_of("llama"), max_batch_size=2)
    decoder._scheduler.waiting = OnlyTheFirst()
    requests = [Request([5, 6, 7], 3) for _ in range(200)]
    for request in requests:
        decoder.add(request)
    for request in requests[20:]:
        decoder.abort(request)
    while decoder.has_unfinished:
        decoder.step()
    assert max(sizes) <= 2
    assert [request.finish_reason for request in requests] == ["length"] * 20 + ["aborted"] * 180


def test_requests_pass_from_status_to_status():
    request, other = Request(prompt(40, 1), 3), Request(prompt(3, 2), 9)
    decoder = Decoder(target_of("llama"), max_batch_size=2, limits=CacheLimits(prefill_chunk_size=16))
    assert request.status == "new"
    decoder.add(other)
    decoder.step()
    decoder.add(request)
    found = [request.status]
    while decoder.has_unfinished:
        decoder.step()
        found.append(request.status)
    assert list(dict.fromkeys(found)) == ["waiting", "prefilling", "decoding", "finished"]
