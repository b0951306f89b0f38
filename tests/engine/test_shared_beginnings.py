"""What prompts have in common is computed once; none of it changes a token."""

import pytest
import torch

from hf_specgen import (
    Request,
)
from hf_specgen.engine.scheduler import MIN_SHARED
from tests.support.decoding import prompt
from tests.support.models import assert_partly_accepted
from tests.support.scheduling import FAMILIES, KINDS, Watched, assert_plain


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_a_prompt_share_its_prefill(kind):
    requests = [Request(prompt(40, 1), 12) for _ in range(5)]
    watched = Watched("llama", kind, slots=5).finish(*requests)
    assert watched.num_fed == 40 + 4
    assert_plain("llama", *requests)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_common_beginning_is_computed_once_while_one_of_its_prompts_has_a_slot(family, kind):
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
