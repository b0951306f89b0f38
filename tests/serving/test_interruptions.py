"""A collector that finalises streams inside a round, and interrupts at any line: nothing hangs, no slot is lost."""

import functools
import gc
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from hf_specgen import get_generation_backend, serving
from hf_specgen.serving.sampling_params import SamplingParams
from tests.support.interrupts import AtLine
from tests.support.models import VOCAB_SIZE, cycle_model
from tests.support.streaming import Threads, assert_idle
from tests.support.tokenizers import letters_tokenizer

FOLDER = Path(serving.__file__).parent
LOCKING = [str(FOLDER / f"{name}.py") for name in ("backend", "fair_lock", "job", "shared_decoder", "streams")]
ROUNDS = [str(path) for room in ("engine", "drafters") for path in (FOLDER.parent / room).glob("*.py")]
PARAMS = SamplingParams(max_new_tokens=5, temperature=0, stop=["zz"], logprobs=1)


@functools.cache
def ring_models():
    """After each letter comes the next one, for the target; the draft is wrong about every third."""
    ring = [0, 1, 2, *range(4, 60), 3, *range(60, VOCAB_SIZE)]
    wrong = [other if number % 3 else (other + 1) % 50 for number, other in enumerate(ring)]
    return cycle_model(ring), cycle_model(wrong)


@functools.cache
def tokenizer():
    return letters_tokenizer()


def make_backend():
    target, draft = ring_models()
    return get_generation_backend(
        "speculative", target, tokenizer(), draft_model=draft, num_assistant_tokens=3, max_batch_size=3
    )


in_processor = {"call": lambda: None}


def unchanged(input_ids, scores):
    in_processor["call"]()
    return scores


def handler(backend):
    """As that of a server: a generator that reads a stream."""
    with backend.stream("abc", PARAMS) as stream:
        yield from stream


def left_in_a_cycle(backend, num_read=1):
    """A generator that nobody reads any more, which only the collector finds."""
    generator = handler(backend)
    for _ in range(num_read):
        next(generator)
    cycle = [generator]
    cycle.append(cycle)
    return cycle


def use(backend):
    """All that a caller may do: the texts of it."""
    texts = ["".join(backend.stream("bcd", PARAMS, request_id="x"))]
    with backend.stream("cde", PARAMS, request_id="y", timeout=1000) as stream:
        next(stream)
    texts += [c.text for c in backend.generate(["de", "ef"], PARAMS, request_ids=["a", "b"], timeout=1000)]
    aborted = backend.stream_batch(["fg"] * 4, PARAMS, request_ids="z")
    next(aborted)
    backend.abort("z")
    list(aborted)
    return texts


TEXTS = ["efghi", "fghij", "ghijk"]


def lines_of(files):
    backend = make_backend()
    with AtLine(files) as traced:
        assert use(backend) == TEXTS
    return traced


@pytest.mark.parametrize("num_read", [1, 2])
@pytest.mark.parametrize("files", [LOCKING, ROUNDS], ids=["locking", "rounds"])
@pytest.mark.slow
def test_collector_may_close_a_stream_at_any_line(files, num_read):
    """It runs on the thread that holds the lock, waits for it, or has just given it back."""
    numbers = lines_of(files).numbers
    assert len(numbers) > 150
    backend, found, collected = make_backend(), [], []

    def collect_at(number):
        kept = [left_in_a_cycle(backend, num_read)]

        def collect():
            kept.clear()
            gc.collect(0), gc.collect(1)

        with AtLine(files, number, collect):
            found.append(use(backend) == TEXTS)
        collected.append(not kept)

    gc.collect()
    gc.freeze()  # what was there before need not be looked at a thousand times
    try:
        for number in numbers:
            Threads(lambda number=number: collect_at(number)).join()
            assert_idle(backend)
    finally:
        gc.unfreeze()
    assert found == [True] * len(numbers)
    assert sum(collected) > 0.9 * len(numbers), "the last lines may not come again"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in `__del__` it goes no further
@pytest.mark.slow
def test_interrupt_at_any_line_leaves_nothing_locked_and_no_slot_taken():
    traced = lines_of(LOCKING)
    backend = make_backend()
    for number in traced.numbers:
        with suppress(KeyboardInterrupt), AtLine(LOCKING, number) as interrupted:
            use(backend)
        assert len(interrupted.lines) == number
        assert use(backend) == TEXTS, traced.lines[number - 1]
        assert_idle(backend)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_at_any_line_while_others_read_costs_them_at_most_a_round():
    """An interrupt ends the requests of its round; those that wait, and all that come, have their texts."""
    traced = lines_of(LOCKING)
    backend = make_backend()
    for number in traced.numbers[::17]:
        others = [backend.stream("bcd", PARAMS) for _ in range(5)]
        with suppress(KeyboardInterrupt), AtLine(LOCKING, number):
            use(backend)
        for stream in others:
            try:
                assert "".join(stream) == TEXTS[0]
            except RuntimeError as error:
                assert "interrupted" in str(error)
        assert use(backend) == TEXTS
        assert_idle(backend)


@pytest.mark.parametrize("phase", ["target", "draft", "processor", "on_round", "observe", "tokenizer", "commit"])
def test_collector_may_close_a_stream_in_any_phase_of_a_round(monkeypatch, phase):
    backend = make_backend()
    decoder, kept = backend._shared.decoder, []

    def collecting(function):
        def called(*args, **kwargs):
            if kept and backend._shared._lock.is_inside:
                kept.clear()
                gc.collect()
            return function(*args, **kwargs)

        return called

    target, draft = ring_models()
    kept.append(left_in_a_cycle(backend))
    with monkeypatch.context() as patch:
        if phase in ("target", "draft"):
            model = target if phase == "target" else draft
            patch.setattr(model, "forward", collecting(model.forward))
        elif phase == "processor":
            make = SamplingParams.logits_processor

            def with_processor(self, *args, **kwargs):
                processors = make(self, *args, **kwargs)
                processors.append(unchanged)
                return processors

            patch.setattr(SamplingParams, "logits_processor", with_processor)
            patch.setitem(in_processor, "call", collecting(in_processor["call"]))
        elif phase == "on_round":
            decoder.on_round = collecting(lambda *args: None)
        elif phase == "observe":
            patch.setattr(decoder.drafter, "observe", collecting(decoder.drafter.observe))
        elif phase == "tokenizer":
            patch.setattr(type(tokenizer()), "decode", collecting(type(tokenizer()).decode))
        else:
            patch.setattr(type(decoder.rows), "commit", collecting(type(decoder.rows).commit))
        reading = []
        Threads(lambda: reading.append("".join(backend.stream("bcd", PARAMS)))).join()
    assert kept == [] and reading == [TEXTS[0]]
    assert_idle(backend)


def test_closing_does_not_wait_for_a_round_of_another_thread(monkeypatch):
    """An event loop may close, drop and abort while a thread of its pool decodes."""
    backend, target = make_backend(), ring_models()[0]
    forward, closed = target.forward, []
    streams = [backend.stream("abc", PARAMS, request_id=str(number)) for number in range(3)]
    next(streams[0])

    def close_from_outside():
        streams[0].close()
        closed.append(backend.abort("1"))
        closed.append(backend.abort("1"))
        streams.pop()

    def called(*args, **kwargs):
        if not closed:
            Threads(close_from_outside).join()
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", called)
        assert "".join(backend.stream("bcd", PARAMS)) == TEXTS[0]
    assert closed == [True, False]
    assert_idle(backend)


@pytest.mark.parametrize("call", ["stream", "generate", "stream_batch", "next"])
def test_asking_for_text_inside_a_round_is_refused_rather_than_waited_for(call):
    backend, errors = make_backend(), []
    other = backend.stream("abc", PARAMS)

    def ask(*args):
        try:
            next(other) if call == "next" else getattr(backend, call)(["a"] if call != "stream" else "a", PARAMS)
        except RuntimeError as error:
            errors.append(str(error))

    backend._shared.decoder.on_round = ask
    found = []
    Threads(lambda: found.append("".join(backend.stream("bcd", PARAMS)))).join()
    assert found == [TEXTS[0]] and errors and "inside one of its own rounds" in errors[0]
    other.close()
    assert_idle(backend)


def test_nothing_is_warned_of_in_a_usual_call():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert use(make_backend()) == TEXTS
