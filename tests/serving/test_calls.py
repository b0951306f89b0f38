"""Calls that are named, timed, or ended by others; what a stream tells beside its text; what a call costs."""

import itertools
import weakref
from pathlib import Path

import pytest
from torch import nn

import hf_specgen
from hf_specgen import get_generation_backend
from hf_specgen.serving.sampling_params import SamplingParams
from tests.support.interrupts import AtLine
from tests.support.models import make_model, noisy_copy
from tests.support.serving import Fault, backend_of, greedy, random_prompts
from tests.support.streaming import Threads, assert_idle
from tests.support.tokenizers import TOKENIZER

ENDLESS = greedy(60, ignore_eos=True)


def at_pass(backend, number, action):
    """Calls `action` in another thread, inside the pass of that number."""
    passes = itertools.count(1)

    def called(*args):
        if next(passes) == number:
            Threads(action).join()

    return backend.model.register_forward_pre_hook(called)


def rounds_until_free(backend):
    """How many rounds the slots of requests that have been ended stay taken."""
    reader, count = backend.stream("zz", ENDLESS), 0
    for _ in reader:
        if sum(request is not None for request in backend._shared.decoder.rows.requests) <= 1:
            break
        count += 1
    reader.close()
    return count


# Names


@pytest.mark.parametrize("kind", ["eager", "batched", "speculative"])
def test_generate_ends_when_another_thread_asks(kind):
    backend, found = backend_of(kind), []
    whole = backend.generate(["abc", "xyz", "hi", "waits"], ENDLESS)
    hook = at_pass(backend, 4, lambda: found.extend(backend.abort(name) for name in ("b", "d", "no", "b")))
    try:
        completions = backend.generate(["abc", "xyz", "hi", "waits"], ENDLESS, request_ids=["a", "b", "c", "d"])
    finally:
        hook.remove()
    assert found == [True, True, False, False]
    assert [c.finish_reason for c in completions] == ["length", "aborted", "length", "aborted"]
    assert [c.text for c in completions][::2] == [c.text for c in whole][::2]
    assert all(whole[n].text.startswith(completions[n].text) and len(completions[n].token_ids) < 60 for n in (1, 3))
    assert_idle(backend)


@pytest.mark.parametrize("call", ["generate", "stream_batch"])
def test_one_name_ends_a_whole_call(call):
    backend = backend_of("batched", max_batch_size=2)
    other = backend.stream("zz", ENDLESS, request_id="other")
    hook = at_pass(backend, 3, lambda: backend.abort("x"))
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, n=2)
    try:
        if call == "generate":
            completions = backend.generate(["abc"] * 3, params, request_ids="x")
        else:
            stream = backend.stream_batch(["abc"] * 3, params, request_ids="x")
            list(stream)
            completions = stream.completions
    finally:
        hook.remove()
    assert [c.finish_reason for c in completions] == ["aborted"] * 6
    assert len("".join(other)) > 30 and not backend.abort("x")
    assert_idle(backend)


def test_names_are_checked_before_anything_is_queued():
    backend = backend_of("batched")
    waiting = backend.stream("abc", ENDLESS, request_id="x")
    for call in (backend.generate, backend.stream_batch):
        for names, error, words in (
            (["a"], ValueError, "one name per prompt, 2, but holds 1"),
            (["a", "a"], ValueError, "each name once"),
            (["a", 5], TypeError, "texts"),
            (7, TypeError, "texts"),
            (["a", "x"], ValueError, "'x' belongs to a request that has not ended"),
            ("x", ValueError, "'x' belongs to a request that has not ended"),
        ):
            with pytest.raises(error, match=words):
                call(["hi", "there"], ENDLESS, request_ids=names)
            assert len(backend._shared._open) == 1 and list(backend._shared._named) == ["x"]
    with pytest.raises(TypeError, match="texts"):
        backend.stream("abc", ENDLESS, request_id=5)
    waiting.close()
    assert len(backend.generate(["hi", "there"], greedy(3), request_ids=["a", "x"])) == 2
    assert_idle(backend)


def test_slot_of_a_client_that_has_gone_is_free_within_one_round():
    backend = backend_of("batched", max_batch_size=4)
    streams = [backend.stream("abc", ENDLESS, request_id=str(number)) for number in range(3)]
    next(streams[0])
    streams[0].close()
    backend.abort("1")
    streams.pop()
    assert rounds_until_free(backend) == 0
    assert_idle(backend)


# Deadlines


class Clock:
    """Stands still until it is told to move."""

    def __init__(self, backend):
        self.now = 100.0
        backend._shared.clock = lambda: self.now


@pytest.mark.parametrize("kind", ["eager", "batched", "speculative"])
def test_generate_ends_when_its_time_is_over(kind):
    backend = backend_of(kind)
    clock = Clock(backend)
    (whole,) = backend.generate(["abc"], ENDLESS)

    def pass_time(*args):
        clock.now += 1

    hook = backend.model.register_forward_pre_hook(pass_time)
    try:
        completions = backend.generate(["abc"] * 10, ENDLESS, timeout=5.5)
    finally:
        hook.remove()
    assert {c.finish_reason for c in completions} == {"time"}
    assert all(whole.text.startswith(c.text) and c.error is None for c in completions)
    assert 0 < len(completions[0].token_ids) < 60 and completions[-1].token_ids == ()
    assert_idle(backend)


def test_deadline_frees_the_slot_of_a_stream_that_nobody_reads():
    backend = backend_of("batched", max_batch_size=2)
    clock = Clock(backend)
    left = backend.stream("abc", ENDLESS, timeout=10)
    batch = backend.stream_batch(["hi"] * 3, ENDLESS, timeout=10)
    later = backend.stream("xyz", greedy(5), timeout=1000)
    next(left)
    clock.now += 11
    assert len("".join(later)) > 0 and later.completion.finish_reason in ("length", "eos")
    assert len(backend._shared._open) == 0
    list(left), list(batch)
    assert left.completion.finish_reason == "time" and len(left.completion.token_ids) > 0
    assert {c.finish_reason for c in batch.completions} == {"time"}
    assert_idle(backend)


def test_deadlines_of_requests_that_have_ended_are_forgotten():
    backend = backend_of("batched")
    for _ in range(50):
        backend.generate(["abc"], greedy(1), timeout=1e9)
    assert len(backend._shared._deadlines) <= 3


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "5", True])
def test_timeout_has_to_be_a_number_of_seconds(timeout):
    backend = backend_of("batched")
    for call in (backend.generate, backend.stream_batch):
        with pytest.raises((ValueError, TypeError), match="`timeout` has to be"):
            call(["abc"], ENDLESS, timeout=timeout)
    assert_idle(backend)


# Log-probabilities


@pytest.mark.parametrize("kind", ["eager", "lookup", "speculative", "dspark"])
def test_logprobs_come_with_the_pieces_of_their_tokens(kind):
    backend = backend_of(kind)
    prompts = random_prompts(4, seed=31)
    params = SamplingParams(max_new_tokens=20, seed=3, logprobs=2, stop=["e"])
    given = [[], [], [], []]
    with backend.stream_batch(prompts, params) as stream:
        for number, _ in stream:
            assert len(stream.logprobs) >= 1
            given[number].extend(stream.logprobs)
    for own, completion in zip(given, stream.completions, strict=True):
        assert tuple(own) == completion.logprobs[: len(own)]
        assert len(completion.logprobs) == len(completion.token_ids)
        ids = [entry.token_id for entry in own]
        assert TOKENIZER.decode(ids, skip_special_tokens=True).startswith(completion.text)
    single = backend.stream(prompts[0], params)
    assert single.logprobs == ()
    assert [entry.token_id for _ in single for entry in single.logprobs] == [entry.token_id for entry in given[0]]


def test_streams_without_logprobs_carry_none():
    stream = backend_of("batched").stream("abc", greedy(5))
    assert {stream.logprobs for _ in stream} == {()}
    assert stream.completion.logprobs is None


# Training mode


def dropping(model):
    """The model with dropout in every layer."""
    for layer in model.model.layers:
        layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.5))
    return model


@pytest.mark.parametrize("trains", ["model", "layer", "draft"])
def test_text_is_that_of_eval_mode_and_the_modes_are_restored(trains):
    target = dropping(make_model(seed=4))
    draft = noisy_copy(target)
    settings = {"draft_model": draft, "num_assistant_tokens": 3}
    expected = get_generation_backend("speculative", target, TOKENIZER, **settings).generate(["abc", "hi"], ENDLESS)
    {"model": target, "layer": target.model.layers[1].mlp, "draft": draft}[trains].train()
    modes = [module.training for model in (target, draft) for module in model.modules()]
    assert any(modes)
    backend = get_generation_backend("speculative", target, TOKENIZER, **settings)
    assert [c.text for c in backend.generate(["abc", "hi"], ENDLESS)] == [c.text for c in expected]
    hook = target.lm_head.register_forward_hook(raise_fault)
    with pytest.raises(Fault):
        list(backend.stream("abc", ENDLESS))
    hook.remove()
    assert [module.training for model in (target, draft) for module in model.modules()] == modes
    assert "".join(backend.stream("abc", ENDLESS)) == expected[0].text
    assert_idle(backend)


def raise_fault(*args):
    raise Fault


# Costs


FILES = [str(path) for path in Path(hf_specgen.__file__).parent.rglob("*.py")]


def num_lines(action):
    with AtLine(FILES) as traced:
        action()
    return len(traced.lines)


def costs_beside(num_waiting):
    """What one request costs while others are decoded and `num_waiting` wait."""
    backend = backend_of("batched", max_batch_size=2)
    params = greedy(40, ignore_eos=True)
    readers = [backend.stream("abc", params), backend.stream("hi", params)]
    next(readers[0]), next(readers[1])
    waiting = [backend.stream_batch(["xyz"] * 10, params, timeout=1000) for _ in range(num_waiting // 10)]
    waiting.append(backend.stream("abc", params, request_id="some"))
    costs = {
        "submit": num_lines(lambda: waiting.append(backend.stream("xyz", params))),
        "round": num_lines(lambda: next(readers[0])),
        "abort": num_lines(lambda: backend.abort("some")),
        "close": num_lines(lambda: waiting.pop().close()),
        "refuse": num_lines(lambda: backend.refusal("abc", params)),
    }
    waiting.clear()
    readers.clear()
    assert_idle(backend)
    return costs


def test_submitting_closing_and_a_round_cost_the_same_whatever_waits():
    """Counted in lines of Python, comprehensions included."""
    few, many = costs_beside(10), costs_beside(1000)
    print(f"\n{few}, {many}")
    assert all(abs(few[name] - many[name]) <= 3 for name in few), (few, many)


def test_reading_many_streams_of_one_call_costs_what_is_new():
    counts = []
    for num_prompts in (20, 400):
        backend = backend_of("batched", max_batch_size=2)
        stream = backend.stream_batch(["abc"] * num_prompts, greedy(40, ignore_eos=True))
        for _ in range(4):
            next(stream)
        counts.append(num_lines(lambda stream=stream: [next(stream) for _ in range(4)]))
        stream.close()
    assert abs(counts[0] - counts[1]) <= 3, counts


def test_backend_is_freed_at_once_and_not_by_the_collector():
    backend = get_generation_backend("batched", make_model(seed=5), TOKENIZER)
    assert len("".join(backend.stream("abc", greedy(3)))) > 0
    freed = []
    for part in (backend, backend._shared, backend._shared.decoder):
        weakref.finalize(part, freed.append, 1)
    del part, backend
    assert freed == [1, 1, 1]
