"""Threads share a backend: names, failures, interrupts and the order in which they come."""

import gc
import itertools
import threading
import traceback
import weakref

import pytest
import torch
from tqdm import tqdm

from hf_specgen.serving.detokenizer import REPLACEMENT
from hf_specgen.serving.fair_lock import FairLock
from tests.support.serving import Fault, raise_at
from tests.support.streaming import (
    Threads,
    assert_idle,
    byte_backend_of,
    byte_models,
    endless,
    is_free,
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
    assert len(backend._shared._open) == 1
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3, 6])
@pytest.mark.parametrize("kind", ["batched", "speculative", "dspark"])
def test_exception_of_the_model_reaches_the_readers_of_its_pass_whoever_runs_it(monkeypatch, kind, number):
    """Every request whose tokens were in the pass fails with it; all others give their whole text."""
    backend, target = byte_backend_of(kind, max_batch_size=4, prefill_chunk_size=8), byte_models()["target"]
    prompts = ["hi", "a", "b" * 20, "c" * 40, "waits"]
    expected = ["".join(byte_backend_of(kind).stream(prompt, endless())) for prompt in prompts]
    streams = [backend.stream(prompt, endless(), request_id=prompt) for prompt in prompts]
    texts = ["", "", "", "", ""]
    texts[1] += next(streams[1])
    concerned = []

    def failing(*args, **kwargs):
        if len(concerned) == 0 and next(calls) == number:
            concerned.extend(backend._shared.decoder.in_pass)
            raise Fault("broken")
        return forward(*args, **kwargs)

    forward, calls, errors = target.forward, itertools.count(1), []
    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", failing)
        for index in (4, 0, 1, 2, 3):  # the first one to run the rounds waits for a slot
            is_concerned = None
            try:
                for piece in streams[index]:
                    texts[index] += piece
            except Fault as error:
                errors.append(error)
                is_concerned = True
            (job,) = streams[index]._batch._call.jobs
            assert (job.request in concerned) == bool(is_concerned)
    assert 0 < len(errors) < 5 and len({id(error) for error in errors}) == 1
    for text, whole, stream in zip(texts, expected, streams, strict=True):
        failed = stream.completion.error is not None
        assert stream.completion.finish_reason == ("error" if failed else "length")
        assert whole.startswith(text.rstrip(REPLACEMENT)) if failed else whole == text
        if failed:
            with pytest.raises(Fault):
                list(stream)
    assert not any(backend.abort(prompt) for prompt in prompts)
    assert "".join(backend.stream("hi", endless(), request_id="hi")) == expected[0]
    assert_idle(backend)


def test_error_of_a_pass_does_not_keep_its_tensors(monkeypatch):
    backend, target = byte_backend_of("batched"), byte_models()["target"]
    kept = []

    def failing(*args, **kwargs):
        logits = torch.zeros(10)
        kept.append(weakref.ref(logits))
        try:
            raise KeyError("cause")
        except KeyError as error:
            raise Fault("broken") from error

    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", failing)
        with pytest.warns(UserWarning, match="broken"):
            completions = backend.generate(["hi", "a"], endless())
    gc.collect()
    assert [type(c.error) for c in completions] == [Fault, Fault]
    assert kept and all(tensor() is None for tensor in kept)
    assert "failing" in "".join(traceback.format_exception(completions[0].error)), "the lines are still told"


@pytest.mark.slow
def test_interrupt_in_a_round_reaches_who_runs_it_and_ends_those_in_the_round(monkeypatch):
    backend, target = byte_backend_of("batched", max_batch_size=2), byte_models()["target"]
    expected = "".join(backend.stream("c", endless()))
    reading, other, waiting = (backend.stream(prompt, endless()) for prompt in ("hi", "a", "c"))
    next(reading)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(reading)
        assert is_free(backend._shared._lock)
    for stream in (reading, other):
        with pytest.raises(RuntimeError, match="interrupted"):
            list(stream)
        assert stream.completion.finish_reason == "error"
    assert "".join(waiting) == expected
    assert_idle(backend)


def test_interrupt_between_rounds_frees_the_slots_of_generate(monkeypatch):
    backend, rounds = byte_backend_of("batched"), itertools.count()
    advance = backend._shared.advance

    def interrupted(call):
        if next(rounds) == 3:
            raise KeyboardInterrupt
        return advance(call)

    monkeypatch.setattr(backend._shared, "advance", interrupted)
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


@pytest.mark.slow
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
def test_slot_is_freed_while_another_thread_decodes(how):
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
        assert len(backend._shared._open) <= 1
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


def test_stream_dropped_while_a_round_ends_is_seen_to(monkeypatch):
    """The collector may run between the last look at what was released and the moment the lock is free."""
    backend = byte_backend_of("batched")
    streams = [backend.stream("hi", endless()), backend.stream("a", endless())]
    next(streams[0])
    leave = FairLock._leave

    def drop_and_leave(lock):
        streams.clear()
        leave(lock)

    monkeypatch.setattr(FairLock, "_leave", drop_and_leave)
    assert backend.refusal("b", endless()) is None
    monkeypatch.undo()
    assert streams == []
    assert_idle(backend)


@pytest.mark.slow
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
