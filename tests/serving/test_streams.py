"""Streams give away what is final, piece by piece; to stop reading frees the seat; threads share a backend."""

import functools
import gc
import itertools
import random
import threading

import pytest
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from hf_specgen.engine.decoder import Decoder
from hf_specgen.serving.backend import GenerationBackend
from hf_specgen.serving.backends import get_generation_backend
from hf_specgen.serving.detokenizer import REPLACEMENT
from hf_specgen.serving.sampling_params import SamplingParams
from tests.serving.test_backends import Fault, letters_tokenizer, raise_at
from tests.serving.test_detokenizer import byte_level
from tests.support.dspark_models import bigram_target, fitted_drafter
from tests.support.models import VOCAB_SIZE, assert_partly_accepted, cycle_model, noisy_copy

KINDS = ["eager", "batched", "lookup", "speculative", "dspark"]
NUM_BYTES = 259


@functools.cache
def models():
    """The target of bytes, and its drafters."""
    target = bigram_target(vocab_size=NUM_BYTES + 1, eos_token_id=NUM_BYTES - 1)
    target.generation_config.eos_token_id = NUM_BYTES - 1
    return {"target": target, "speculative": noisy_copy(target), "dspark": fitted_drafter(target)}


@functools.cache
def byte_tokenizer():
    """One token per byte, <pad>, <bos> and <eos>: random text is full of broken characters."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(merges=False))
    tokenizer.add_special_tokens({"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"})
    assert len(tokenizer) == NUM_BYTES
    return tokenizer


def backend_of(kind, **settings):
    if kind in ("speculative", "dspark"):
        settings |= {"draft_model": models()[kind], "num_assistant_tokens": 3}
    return get_generation_backend(
        kind.replace("lookup", "speculative"), models()["target"], byte_tokenizer(), **settings
    )


def assert_idle(backend):
    """Everything is as at the start: no seat, no memory, no memory of a request."""
    assert (backend._jobs, backend._named, list(backend._abandoned)) == ({}, {}, [])
    assert not backend._decoder.has_unfinished and not backend._lock.locked()
    rows = backend._decoder.rows
    assert rows.requests == [None] * len(rows.requests)
    for cache in rows.caches():
        assert cache.lengths.tolist() == [0] * len(rows.requests) and cache.num_allocated_rows == 0
        assert all(layer.keys is None or layer.keys.numel() == 0 for layer in cache.layers)


# They come often, so that characters are built in pieces.
BYTE_IDS = set(byte_tokenizer()("é€😀नमस्ते👩‍👩‍👧e\u0301abc tu")["input_ids"])


def random_params(seed, **settings):
    generator = random.Random(seed)
    stops = ["a", "b", "u", "t", "é", "नम", "ca", "t ", REPLACEMENT + "c", "😀"]
    drawn = {
        "max_new_tokens": generator.randint(1, 40),
        "temperature": generator.choice([0.0, 0.7, 1.5]),
        "top_p": generator.choice([1.0, 0.9]),
        "repetition_penalty": generator.choice([1.0, 1.2]),
        "frequency_penalty": generator.choice([0.0, 0.8]),
        "logit_bias": {token_id: 8.0 if token_id > 90 else 14.0 for token_id in BYTE_IDS},
        "stop": generator.sample(stops, k=generator.choice([0, 2, 5])),
        "ignore_eos": generator.choice([False, True]),
        "logprobs": generator.choice([None, 1]),
        "seed": seed,
    }
    return SamplingParams(**{**drawn, **settings})


def random_prompts(count, seed=0):
    generator = random.Random(seed)
    texts = ["hi", "नमस्ते", "a😀", "tu e\u0301", "€" * 9, "cab" * 7]
    return ["".join(generator.choices(texts, k=generator.randint(1, 3))) for _ in range(count)]


# Pieces


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_joined_are_the_text_of_generate(kind):
    backend, other = backend_of(kind), backend_of(kind)
    prompts, params = random_prompts(18, seed=1), [random_params(seed) for seed in range(18)]
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
        (self.job,) = self.stream._batch._jobs
        self.pieces = [(piece, list(self.job.request.token_ids)) for piece in self.stream]


@pytest.mark.parametrize("kind", ["batched", "lookup", "dspark"])
def test_no_piece_holds_a_broken_character_that_later_tokens_complete(kind):
    """What was given away never changes, and all is given away that cannot change."""
    backend, num_held, num_broken = backend_of(kind), 0, 0
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
    backend = backend_of("batched")
    stream = backend.stream("hi", random_params(1, max_new_tokens=8, ignore_eos=True, stop=()))
    assert stream.completion is None
    next(stream)
    assert stream.completion is None
    list(stream)
    assert stream.completion.finish_reason == "length" and len(stream.completion.token_ids) == 8
    with pytest.raises(StopIteration):
        next(stream)
    assert_idle(backend)


def endless(**settings):
    return random_params(3, max_new_tokens=120, ignore_eos=True, stop=(), temperature=0.7, **settings)


def left_by_its_generator(backend):
    """A consumer that is a generator itself, and is thrown away."""

    def consumer():
        yield from backend.stream("hi", endless())

    return consumer()


@pytest.mark.parametrize("num_read", [0, 1, 3])
@pytest.mark.parametrize("how", ["close", "del", "generator", "cycle", "exception"])
def test_consumer_that_stops_reading_frees_seat_and_memory(how, num_read):
    backend = backend_of("speculative")
    stream = left_by_its_generator(backend) if how == "generator" else backend.stream("hi", endless())
    for _ in range(num_read):
        next(stream)
    if num_read or how != "generator":
        assert len(backend._jobs) == 1
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
    backend = backend_of("batched")
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
    backend = backend_of("batched")
    stream = backend.stream("hi", endless())
    text = next(stream)
    del backend
    gc.collect()
    assert len(text + "".join(stream)) > 20
    assert stream.completion.finish_reason == "length"


# Many texts


@pytest.mark.parametrize("kind", KINDS)
def test_stream_batch_gives_every_row_its_own_pieces(kind):
    backend = backend_of(kind)
    prompts, params = random_prompts(9, seed=5), [random_params(40 + seed) for seed in range(9)]
    stream = backend.stream_batch(prompts, params)
    texts, order = [""] * 9, []
    for number, piece in stream:
        assert piece
        texts[number] += piece
        order.append(number)
    expected = backend_of(kind).generate(prompts, params)
    assert texts == [c.text for c in stream.completions] == [c.text for c in expected]
    assert [c.token_ids for c in stream.completions] == [c.token_ids for c in expected]
    assert [(c.index, c.sample) for c in stream.completions] == [(i, 0) for i in range(9)]
    if kind != "eager":
        assert order != sorted(order), "the rows went one after the other"
    assert_idle(backend)


def test_stream_batch_numbers_samples_one_after_the_other():
    backend = backend_of("batched")
    params = [endless(n=2), endless(n=1), endless(n=3)]
    stream = backend.stream_batch(["hi", "a", "b"], params)
    numbers = {number for number, _ in stream}
    assert numbers == set(range(6))
    assert [(c.index, c.sample) for c in stream.completions] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    with pytest.raises(ValueError, match="`n` is 2; use `stream_batch`"):
        backend.stream("hi", params[0])
    assert_idle(backend)


def test_stream_batch_of_nothing_ends():
    stream = backend_of("batched").stream_batch([])
    assert list(stream) == [] and stream.completions == []


def test_refused_prompt_of_a_batch_leaves_the_others_their_streams():
    backend = backend_of("batched")
    stream = backend.stream_batch(["hi", [], "a"], endless())
    assert {number for number, _ in stream} == {0, 2}
    good, bad, other = stream.completions
    assert bad.finish_reason == "error" and isinstance(bad.error, ValueError)
    assert good.finish_reason == other.finish_reason == "length"


def test_closed_batch_frees_all_its_seats():
    backend = backend_of("batched", max_batch_size=3)
    stream = backend.stream_batch(["hi"] * 7, endless())
    next(stream)
    assert len(backend._jobs) == 7
    stream.close()
    assert_idle(backend)
    list(stream)
    assert {c.finish_reason for c in stream.completions} == {"aborted"}
    del stream
    stream = backend.stream_batch(["hi"] * 7, endless())
    next(stream)
    del stream
    assert_idle(backend)


def test_streams_in_turns_share_the_rounds():
    """Reading one stream brings the other on: both texts are those alone, in the passes of one."""
    backend = backend_of("batched")
    expected = ["".join(backend.stream(prompt, endless())) for prompt in ("hi", "a")]
    num_alone = backend.stats.target_forwards
    streams = [backend.stream(prompt, endless()) for prompt in ("hi", "a")]
    texts = ["", ""]
    for pieces in itertools.zip_longest(*streams, fillvalue=""):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    assert texts == expected
    assert backend.stats.target_forwards - num_alone < 0.7 * num_alone


def test_nothing_is_computed_while_nobody_reads():
    backend = backend_of("batched")
    stream = backend.stream("hi", endless())
    assert backend.stats.target_forwards == 0
    next(stream)
    count = backend.stats.target_forwards
    assert 0 < count < 10 and backend.stats.target_forwards == count


# Names


def test_request_is_aborted_by_its_name():
    backend = backend_of("speculative")
    named, other = backend.stream("hi", endless(), request_id="x"), backend.stream("a", endless())
    given = next(named)
    assert backend.abort("y") is False and backend.abort("x") is True and backend.abort("x") is False
    given += "".join(named)
    assert named.completion.finish_reason == "aborted" and named.completion.text == given
    expected = "".join(backend_of("speculative").stream("a", endless()))
    assert "".join(other) == expected
    assert_idle(backend)


def test_waiting_request_is_aborted_by_its_name():
    backend = backend_of("eager")
    first, waiting = backend.stream("hi", endless()), backend.stream("a", endless(), request_id="x")
    next(first)
    assert backend.abort("x")
    assert list(waiting) == [] and waiting.completion.finish_reason == "aborted" and waiting.completion.text == ""
    first.close()
    assert_idle(backend)


def test_name_of_a_request_that_has_not_ended_is_refused():
    backend = backend_of("batched")
    first = backend.stream("hi", endless(), request_id="x")
    with pytest.raises(ValueError, match="`request_id` 'x' belongs to a request that has not ended"):
        backend.stream("a", endless(), request_id="x")
    assert len(backend._jobs) == 1
    next(first)
    first.close()
    second = backend.stream("a", endless(), request_id="x")
    assert "".join(second) and second.completion.finish_reason == "length"
    third = backend.stream("a", random_params(1, max_new_tokens=2), request_id="x")
    list(third)
    assert_idle(backend)


def test_name_of_a_request_that_was_refused_is_free():
    backend = backend_of("batched", max_tokens_in_cache=200)
    for prompt, params in (("", endless()), ("hi", random_params(1, max_new_tokens=200))):
        with pytest.raises(ValueError):
            backend.stream(prompt, params, request_id="x")
    assert_idle(backend)
    list(backend.stream("hi", random_params(1, max_new_tokens=3), request_id="x"))


# Failures


@pytest.mark.parametrize("kind", ["batched", "speculative", "dspark"])
def test_exception_of_the_model_reaches_every_consumer(monkeypatch, kind):
    backend, target = backend_of(kind), models()["target"]
    expected = "".join(backend.stream("hi", endless()))
    first, second = backend.stream("hi", endless(), request_id="x"), backend.stream("a", endless())
    many = backend.stream_batch(["b"] * 9, endless())
    next(first)
    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", raise_at(target.forward, 3))
        with pytest.raises(Fault, match="broken") as raised:
            list(first)
    assert_idle(backend)
    with pytest.raises(Fault) as again:
        list(second)
    assert again.value is raised.value
    list(many)
    assert all(c.error is raised.value and c.finish_reason == "error" for c in many.completions)
    with pytest.raises(Fault):
        list(first)
    assert first.completion.finish_reason == "error" and expected.startswith(first.completion.text.rstrip(REPLACEMENT))
    assert backend.abort("x") is False
    assert "".join(backend.stream("hi", endless(), request_id="x")) == expected
    assert_idle(backend)


def test_interrupt_in_a_round_reaches_who_runs_it_and_ends_the_others(monkeypatch):
    backend, target = backend_of("batched"), models()["target"]
    reading, other = backend.stream("hi", endless()), backend.stream("a", endless())
    next(reading)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(reading)
        assert_idle(backend)
        with pytest.raises(KeyboardInterrupt):
            backend.generate(["hi"], endless())
    assert_idle(backend)
    with pytest.raises(RuntimeError, match="interrupted"):
        list(other)
    assert other.completion.finish_reason == "error"
    assert len("".join(backend.stream("hi", endless()))) > 20


def test_interrupt_between_rounds_frees_the_seats_of_generate(monkeypatch):
    backend = backend_of("batched")
    step = backend._step
    counter = itertools.count()

    def interrupted():
        step()
        if next(counter) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(backend, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.generate(["hi"] * 20, endless())
    assert_idle(backend)


# Threads


def test_generate_starts_no_thread(monkeypatch):
    """Nor does its progress bar, whose library likes to have one."""
    monkeypatch.setattr(tqdm, "monitor", None)
    before = threading.active_count()
    assert len(backend_of("batched").generate(["hi", "a"], random_params(1, max_new_tokens=3))) == 2
    assert threading.active_count() == before and tqdm.monitor is None


class Threads:
    """Runs functions in threads of their own; raises what they raised."""

    def __init__(self, *functions):
        self.errors = []
        self.threads = [threading.Thread(target=self._run, args=(function,), daemon=True) for function in functions]
        for thread in self.threads:
            thread.start()

    def _run(self, function):
        try:
            function()
        except BaseException as error:
            self.errors.append(error)

    def join(self):
        for thread in self.threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a thread hangs"
        if self.errors:
            raise self.errors[0]


@pytest.mark.parametrize("kind", ["batched", "speculative", "dspark"])
def test_threads_share_a_backend_and_get_the_texts_that_they_would_get_alone(kind):
    backend, num_threads = backend_of(kind, max_batch_size=4), threading.active_count()
    prompts, params = random_prompts(24, seed=7), [random_params(80 + seed) for seed in range(24)]
    expected = [c.text for c in backend_of(kind).generate(prompts, params)]
    found = [""] * 24

    def stream_own(numbers):
        for number in numbers:
            found[number] = "".join(backend.stream(prompts[number], params[number], request_id=str(number)))

    def generate_own(numbers):
        for number, completion in zip(
            numbers, backend.generate([prompts[n] for n in numbers], [params[n] for n in numbers]), strict=True
        ):
            found[number] = completion.text

    def stream_many(numbers):
        stream = backend.stream_batch([prompts[n] for n in numbers], [params[n] for n in numbers])
        for place, piece in stream:
            found[numbers[place]] += piece

    Threads(
        lambda: stream_own(range(0, 4)),
        lambda: stream_own(range(4, 8)),
        lambda: generate_own(range(8, 16)),
        lambda: stream_many(range(16, 24)),
    ).join()
    assert found == expected
    assert threading.active_count() == num_threads, "a thread is left behind"
    assert_idle(backend)


def busy(backend, started, stopped):
    """Decodes until it is told to stop."""

    def run():
        while not stopped.is_set():
            stream = backend.stream("b", endless())
            next(stream)
            started.set()
            for _ in stream:
                if stopped.is_set():
                    break

    return run


@pytest.mark.parametrize("how", ["close", "del", "abort"])
def test_seat_is_freed_while_another_thread_decodes(how):
    backend, started, stopped = backend_of("batched"), threading.Event(), threading.Event()
    threads = Threads(busy(backend, started, stopped))
    assert started.wait(30)
    for _ in range(10):
        stream = backend.stream("hi", endless(), request_id="x")
        next(stream)
        if how == "close":
            stream.close()
        elif how == "abort":
            assert backend.abort("x")
            list(stream)
            assert stream.completion.finish_reason == "aborted"
        else:
            del stream
            assert backend.abort("x") in (True, False)
        assert backend.abort("x") is False
        assert len(backend._jobs) <= 1
    stopped.set()
    threads.join()
    assert_idle(backend)


def test_abort_ends_a_stream_that_another_thread_reads():
    backend, started, found = backend_of("batched"), threading.Event(), []

    def read():
        stream = backend.stream("hi", random_params(3, max_new_tokens=220, ignore_eos=True, stop=()), request_id="x")
        for _ in stream:
            started.set()
        found.append(stream.completion)

    threads = Threads(read)
    assert started.wait(30)
    assert backend.abort("x")
    threads.join()
    assert found[0].finish_reason == "aborted" and 0 < len(found[0].token_ids) < 220
    assert_idle(backend)


class Name(str):
    """Notes when it is looked up."""

    def __new__(cls, looked_up):
        made = super().__new__(cls, "unknown")
        made.looked_up = looked_up
        return made

    def __hash__(self):
        self.looked_up.append(1)
        return super().__hash__()


def test_thread_that_waits_comes_next():
    """Not when the one that runs rounds without a pause is done with all of them."""
    backend, num_next = backend_of("batched"), 0
    for _ in range(30):
        asking, looked_up = threading.Event(), []

        def ask(asking=asking, looked_up=looked_up):
            asking.set()
            backend.abort(Name(looked_up))

        with backend._exclusively():
            threads = Threads(ask)
            assert asking.wait(30)
        with backend._exclusively():
            num_next += bool(looked_up)
        threads.join()
    assert num_next >= 25, f"only {num_next} of 30; a few may not have been waiting yet"


def test_stream_dropped_while_its_seat_is_tidied_up_is_seen_to(monkeypatch):
    """The collector may run between the last look at what was abandoned and the moment the lock is free."""
    backend = backend_of("batched")
    streams = [backend.stream("hi", endless())]
    next(streams[0])
    look = Decoder.has_unfinished.fget

    def drop_and_look(decoder):
        if backend._lock.locked():  # the last line of tidying up
            streams.clear()
        return look(decoder)

    monkeypatch.setattr(Decoder, "has_unfinished", property(drop_and_look))
    monkeypatch.setattr(GenerationBackend, "_step", lambda self: None)
    assert backend.abort("unknown") is False
    monkeypatch.undo()
    assert streams == []
    assert_idle(backend)


def test_collector_that_runs_inside_a_round_does_not_wait_for_it(monkeypatch):
    """A stream in a cycle is collected by the very thread that holds the lock."""
    backend = backend_of("batched")
    target = models()["target"]
    kept = [backend.stream("hi", endless())]
    next(kept[0])
    forward = target.forward

    def collecting(*args, **kwargs):
        if kept:
            kept.clear()
            gc.collect()
        return forward(*args, **kwargs)

    expected = "".join(backend_of("batched").stream("a", endless()))
    cycle = [kept[0]]
    cycle.append(cycle)
    del cycle
    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", collecting)
        reading = Threads(lambda: kept.append("".join(backend.stream("a", endless()))))
        reading.join()
    assert len(kept) in (0, 1) and reading.errors == []
    assert_idle(backend)
    assert "".join(backend.stream("a", endless())) == expected


def test_threads_of_a_failing_model_all_get_the_exception(monkeypatch):
    backend, target = backend_of("batched"), models()["target"]
    all_in, found = threading.Barrier(3, timeout=30), []

    def read():
        stream = backend.stream("hi", endless())
        all_in.wait()
        try:
            list(stream)
        except Fault as error:
            found.append(error)

    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", raise_at(target.forward, 5))
        Threads(read, read, read).join()
    assert len(found) == 3 and len({id(error) for error in found}) == 1
    assert_idle(backend)
