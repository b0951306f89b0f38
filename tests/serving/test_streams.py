"""Streams give away what is final, piece by piece; to stop reading frees the slot."""

import functools
import gc
import itertools

import pytest

from hf_specgen.serving.backends import get_generation_backend
from hf_specgen.serving.detokenizer import REPLACEMENT
from hf_specgen.serving.sampling_params import SamplingParams
from tests.support.models import VOCAB_SIZE, assert_partly_accepted, cycle_model
from tests.support.serving import KINDS, Fault
from tests.support.streaming import assert_idle, byte_backend_of, endless, random_byte_prompts, random_params
from tests.support.tokenizers import byte_tokenizer, letters_tokenizer

# Pieces


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_joined_are_the_text_of_generate(kind):
    backend, other = byte_backend_of(kind), byte_backend_of(kind)
    prompts, params = random_byte_prompts(18, seed=1), [random_params(seed) for seed in range(18)]
    expected = other.generate(prompts, params)
    num_pieces, num_stopped = 0, 0
    for prompt, own, completion in zip(prompts, params, expected, strict=True):
        stream = backend.stream(prompt, own)
        pieces = list(stream)
        assert all(pieces) and "".join(pieces) == completion.text == stream.completion.text
        assert stream.completion.token_ids == completion.token_ids
        assert stream.completion.finish_reason == completion.finish_reason
        assert stream.completion.logprobs == completion.logprobs or own.logprobs is not None
        assert not any(stop in completion.text for stop in own.stop)
        whole = byte_tokenizer().decode(completion.token_ids, skip_special_tokens=True)
        assert whole.startswith(completion.text)
        if completion.finish_reason == "stop":
            assert any(whole[len(completion.text) :].startswith(stop) for stop in own.stop)
            num_stopped += 1
        else:
            assert whole == completion.text
        num_pieces += len(pieces)
    assert num_pieces > 80 and num_stopped > 2
    assert {c.finish_reason for c in expected} >= {"stop", "length"}
    assert_idle(backend)
    if kind in ("speculative", "dspark"):
        assert_partly_accepted(backend.stats)


class OneByOne:
    """Collects the pieces of a stream with the ids that were there when each came."""

    def __init__(self, backend, prompt, params):
        self.stream = backend.stream(prompt, params)
        (self.job,) = self.stream._batch._call.jobs
        self.pieces = [(piece, list(self.job.request.token_ids)) for piece in self.stream]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["batched", "lookup", "dspark"])
def test_no_piece_holds_a_broken_character_that_later_tokens_complete(kind):
    """What was given away never changes, and all is given away that cannot change."""
    backend, num_held, num_broken = byte_backend_of(kind), 0, 0
    for seed in range(20):
        seen = OneByOne(backend, "नमस्ते", random_params(seed, stop=(), max_new_tokens=40))
        whole = byte_tokenizer().decode(seen.job.request.token_ids, skip_special_tokens=True)
        given = ""
        for number, (piece, ids) in enumerate(seen.pieces):
            given += piece
            assert whole.startswith(given)
            now = byte_tokenizer().decode(ids, skip_special_tokens=True)
            if number < len(seen.pieces) - 1:  # the last one gives away what is held
                held = now[len(given) :]
                assert held in ("", REPLACEMENT)
                num_held += held != ""
            num_broken += REPLACEMENT in piece
        assert given == whole
    assert num_held > 1 and num_broken > 5, "no character was unfinished, or none broken"


@functools.cache
def ring_backend(num_assistant_tokens):
    """After each letter comes the next one: 57 of them in a ring."""
    ring = [0, 1, 2, *range(4, 60), 3, *range(60, VOCAB_SIZE)]
    model = cycle_model(ring)
    settings = {"num_assistant_tokens": num_assistant_tokens} if num_assistant_tokens else {}
    if num_assistant_tokens:
        settings["draft_model"] = cycle_model(ring)
    name = "speculative" if num_assistant_tokens else "batched"
    return get_generation_backend(name, model, letters_tokenizer(), **settings)


@pytest.mark.parametrize("block", [0, 1, 4, 7])
def test_stop_string_ends_the_text_wherever_it_lies_in_a_block(block):
    """Behind "c" comes the alphabet; every 1- to 4-letter window of it as stop string."""
    backend = ring_backend(block)
    alphabet = "defghijklmnopqrstuvwxyz"
    for start, length in itertools.product(range(14), (1, 2, 4)):
        stop = alphabet[start : start + length]
        stream = backend.stream("abc", SamplingParams(max_new_tokens=23, temperature=0, stop=[stop, "zz", "gg"]))
        pieces = list(stream)
        assert "".join(pieces) == alphabet[:start] == stream.completion.text
        assert stream.completion.finish_reason == "stop"
        assert len(stream.completion.token_ids) == start + length
        assert not any(letter in "".join(pieces) for letter in stop)
    if block:
        assert backend.stats.acceptance_rate == 1 and backend.stats.drafting_rounds > 0


def test_letters_that_may_begin_a_stop_string_are_held_back_only_while_they_may():
    backend = ring_backend(0)
    pieces = list(backend.stream("abc", SamplingParams(max_new_tokens=6, temperature=0, stop=["efx", "iz"])))
    assert pieces == ["d", "efg", "h", "i"]


# The end


def test_completion_stands_after_the_end_only():
    backend = byte_backend_of("batched")
    stream = backend.stream("hi", random_params(1, max_new_tokens=8, ignore_eos=True, stop=()))
    assert stream.completion is None
    next(stream)
    assert stream.completion is None
    list(stream)
    assert stream.completion.finish_reason == "length" and len(stream.completion.token_ids) == 8
    with pytest.raises(StopIteration):
        next(stream)
    assert_idle(backend)


def left_by_its_generator(backend):
    """A consumer that is a generator itself, and is thrown away."""

    def consumer():
        yield from backend.stream("hi", endless())

    return consumer()


@pytest.mark.parametrize("num_read", [0, 1, 3])
@pytest.mark.parametrize("how", ["close", "del", "generator", "cycle", "exception"])
def test_consumer_that_stops_reading_frees_slot_and_memory(how, num_read):
    backend = byte_backend_of("speculative")
    stream = left_by_its_generator(backend) if how == "generator" else backend.stream("hi", endless())
    for _ in range(num_read):
        next(stream)
    if num_read or how != "generator":
        assert len(backend._shared._open) == 1
    if how in ("close", "generator"):
        stream.close()
        assert_idle(backend)
    elif how == "cycle":
        cycle = [stream]
        cycle.append(cycle)
        del stream, cycle
        gc.collect()
    elif how == "exception":

        def reads(stream):
            raise Fault

        try:
            reads(stream)
        except Fault:
            pass
        del stream
    else:
        del stream
    assert_idle(backend)


def test_closed_stream_ends_as_aborted_with_the_text_that_it_had():
    backend = byte_backend_of("batched")
    whole = "".join(backend.stream("hi", endless()))
    stream = backend.stream("hi", endless())
    given = next(stream) + next(stream)
    stream.close()
    stream.close()
    given += "".join(stream)
    completion = stream.completion
    assert completion.finish_reason == "aborted" and completion.error is None
    assert given == completion.text and whole.startswith(given.rstrip(REPLACEMENT))
    assert 0 < len(completion.token_ids) < 20


def test_backend_can_be_thrown_away_while_a_stream_is_open():
    backend = byte_backend_of("batched")
    stream = backend.stream("hi", endless())
    text = next(stream)
    del backend
    gc.collect()
    assert len(text + "".join(stream)) > 20
    assert stream.completion.finish_reason == "length"


# Many texts


@pytest.mark.parametrize("kind", KINDS)
def test_stream_batch_gives_every_row_its_own_pieces(kind):
    backend = byte_backend_of(kind)
    prompts, params = random_byte_prompts(9, seed=5), [random_params(40 + seed) for seed in range(9)]
    stream = backend.stream_batch(prompts, params)
    texts, order = [""] * 9, []
    for number, piece in stream:
        assert piece
        texts[number] += piece
        order.append(number)
    expected = byte_backend_of(kind).generate(prompts, params)
    assert texts == [c.text for c in stream.completions] == [c.text for c in expected]
    assert [c.token_ids for c in stream.completions] == [c.token_ids for c in expected]
    assert [(c.index, c.sample) for c in stream.completions] == [(i, 0) for i in range(9)]
    if kind != "eager":
        assert order != sorted(order), "the rows went one after the other"
    assert_idle(backend)


def test_stream_batch_numbers_samples_one_after_the_other():
    backend = byte_backend_of("batched")
    params = [endless(n=2), endless(n=1), endless(n=3)]
    stream = backend.stream_batch(["hi", "a", "b"], params)
    numbers = {number for number, _ in stream}
    assert numbers == set(range(6))
    assert [(c.index, c.sample) for c in stream.completions] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    with pytest.raises(ValueError, match="`n` is 2; use `stream_batch`"):
        backend.stream("hi", params[0])
    assert_idle(backend)


def test_stream_batch_of_nothing_ends():
    stream = byte_backend_of("batched").stream_batch([])
    assert list(stream) == [] and stream.completions == []


def test_refused_prompt_of_a_batch_leaves_the_others_their_streams():
    backend = byte_backend_of("batched")
    stream = backend.stream_batch(["hi", [], "a"], endless())
    assert {number for number, _ in stream} == {0, 2}
    good, bad, other = stream.completions
    assert bad.finish_reason == "error" and isinstance(bad.error, ValueError)
    assert good.finish_reason == other.finish_reason == "length"


def test_closed_batch_frees_all_its_slots():
    backend = byte_backend_of("batched", max_batch_size=3)
    stream = backend.stream_batch(["hi"] * 7, endless())
    next(stream)
    assert len(backend._shared._open) == 7
    stream.close()
    assert_idle(backend)
    list(stream)
    assert {c.finish_reason for c in stream.completions} == {"aborted"}
    del stream
    stream = backend.stream_batch(["hi"] * 7, endless())
    next(stream)
    del stream
    assert_idle(backend)


@pytest.mark.slow
def test_streams_in_turns_share_the_rounds():
    """Reading one stream brings the other on: both texts are those alone, in the passes of one."""
    backend = byte_backend_of("batched")
    expected = ["".join(backend.stream(prompt, endless())) for prompt in ("hi", "a")]
    num_alone = backend.stats.target_forwards
    streams = [backend.stream(prompt, endless()) for prompt in ("hi", "a")]
    texts = ["", ""]
    for pieces in itertools.zip_longest(*streams, fillvalue=""):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    assert texts == expected
    assert backend.stats.target_forwards - num_alone < 0.7 * num_alone


def test_nothing_is_computed_while_nobody_reads():
    backend = byte_backend_of("batched")
    stream = backend.stream("hi", endless())
    assert backend.stats.target_forwards == 0
    next(stream)
    count = backend.stats.target_forwards
    assert 0 < count < 10 and backend.stats.target_forwards == count
