"""A bound on the cache, and settings and requests that can never fit."""

import random

import pytest

from hf_specgen import (
    CacheLimits,
    Decoder,
    PromptLookupDrafter,
    Request,
)
from hf_specgen.engine.limits import CANDIDATE_COLUMNS
from tests.support.decoding import prompt, run
from tests.support.scheduling import Watched, assert_plain, chunked_requests, num_allocated, target_of


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


@pytest.mark.parametrize("field", ["capacity", "max_tokens_in_cache", "prefill_chunk_size"])
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_limits_that_are_no_counts_are_refused_by_name(field, value, error):
    with pytest.raises(error, match=f"^`{field}`"):
        CacheLimits(**{field: value})
    if field == "prefill_chunk_size":
        with pytest.raises(TypeError, match="^`prefill_chunk_size`"):
            CacheLimits(prefill_chunk_size=None)


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"capacity": 1}, "`capacity` has to be at least 2"),
        ({"max_tokens_in_cache": 65}, "`max_tokens_in_cache` has to be at least 66"),
    ],
)
def test_limits_in_which_no_request_fits_are_refused(limits, sentence):
    with pytest.raises(ValueError, match=sentence):
        CacheLimits(**limits)


def test_slots_that_can_never_fit_are_refused_where_they_are_given():
    limits = CacheLimits(capacity=36, max_tokens_in_cache=399)
    with pytest.raises(ValueError, match=r"`max_batch_size` of 4 and `capacity` of 36 need 4 x \(36 \+ 64\) columns"):
        Decoder(target_of("llama"), max_batch_size=4, limits=limits)
    for slots in (1, 3):
        request = Request(prompt(30, 1), 6)
        run(target_of("llama"), None, [request], slots, limits=limits)
        assert_plain("llama", request)


def test_smallest_limits_serve_the_smallest_request():
    for limits in (CacheLimits(capacity=2), CacheLimits(max_tokens_in_cache=66), CacheLimits(2, 66, 1)):
        request = Request([5], 1)
        run(target_of("llama"), None, [request], 1, limits=limits)
        assert_plain("llama", request)
