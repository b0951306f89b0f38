"""Threads share a backend: names, failures, interrupts and the order in which they come."""

import gc
import itertools
import threading

import pytest
from tqdm import tqdm

from hf_specgen.engine.decoder import Decoder
from hf_specgen.serving.backend import GenerationBackend
from hf_specgen.serving.detokenizer import REPLACEMENT
from tests.support.serving import Fault, raise_at
from tests.support.streaming import (
    Threads,
    assert_idle,
    byte_backend_of,
    byte_models,
    endless,
    random_byte_prompts,
    random_params,
)

# Names


def test_request_is_aborted_by_its_name():
    backend = byte_backend_of("speculative")
    named, other = backend.stream("hi", endless(), request_id="x"), backend.stream("a", endless())
    given = next(named)
    assert backend.abort("y") is False and backend.abort("x") is True and backend.abort("x") is False
    given += "".join(named)
    assert named.completion.finish_reason == "aborted" and named.completion.text == given
    expected = "".join(byte_backend_of("speculative").stream("a", endless()))
    assert "".join(other) == expected
    assert_idle(backend)


def test_waiting_request_is_aborted_by_its_name():
    backend = byte_backend_of("eager")
    first, waiting = backend.stream("hi", endless()), backend.stream("a", endless(), request_id="x")
    next(first)
    assert backend.abort("x")
    assert list(waiting) == [] and waiting.completion.finish_reason == "aborted" and waiting.completion.text == ""
    first.close()
    assert_idle(backend)


def test_name_of_a_request_that_has_not_ended_is_refused():
    backend = byte_backend_of("batched")
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
    backend = byte_backend_of("batched", max_tokens_in_cache=200)
    for prompt, params in (("", endless()), ("hi", random_params(1, max_new_tokens=200))):
        with pytest.raises(ValueError):
            backend.stream(prompt, params, request_id="x")
    assert_idle(backend)
    list(backend.stream("hi", random_params(1, max_new_tokens=3), request_id="x"))


# Failures


@pytest.mark.parametrize("kind", ["batched", "speculative", "dspark"])
def test_exception_of_the_model_reaches_every_consumer(monkeypatch, kind):
    backend, target = byte_backend_of(kind), byte_models()["target"]
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
    backend, target = byte_backend_of("batched"), byte_models()["target"]
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
    backend = byte_backend_of("batched")
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
    assert len(byte_backend_of("batched").generate(["hi", "a"], random_params(1, max_new_tokens=3))) == 2
    assert threading.active_count() == before and tqdm.monitor is None


@pytest.mark.parametrize("kind", ["batched", "speculative", "dspark"])
def test_threads_share_a_backend_and_get_the_texts_that_they_would_get_alone(kind):
    backend, num_threads = byte_backend_of(kind, max_batch_size=4), threading.active_count()
    prompts, params = random_byte_prompts(24, seed=7), [random_params(80 + seed) for seed in range(24)]
    expected = [c.text for c in byte_backend_of(kind).generate(prompts, params)]
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
    backend, started, stopped = byte_backend_of("batched"), threading.Event(), threading.Event()
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
    backend, started, found = byte_backend_of("batched"), threading.Event(), []

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
    backend, num_next = byte_backend_of("batched"), 0
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
    backend = byte_backend_of("batched")
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
    backend = byte_backend_of("batched")
    target = byte_models()["target"]
    kept = [backend.stream("hi", endless())]
    next(kept[0])
    forward = target.forward

    def collecting(*args, **kwargs):
        if kept:
            kept.clear()
            gc.collect()
        return forward(*args, **kwargs)

    expected = "".join(byte_backend_of("batched").stream("a", endless()))
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
    backend, target = byte_backend_of("batched"), byte_models()["target"]
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
