"""Backends that are pickled, copied, mapped over a data set, or forked while another thread decodes."""

import copy
import gc
import multiprocessing
import os
import pickle
import signal
import threading

import pytest
from datasets import Dataset
from datasets.fingerprint import Hasher

from hf_specgen import get_generation_backend
from hf_specgen.layers import attention
from hf_specgen.serving import shared_decoder
from tests.support.models import make_model
from tests.support.serving import KINDS, backend_of, greedy, random_prompts
from tests.support.streaming import Threads, assert_idle
from tests.support.tokenizers import TOKENIZER

PROMPTS, PARAMS = random_prompts(3, seed=21), greedy(8)


def texts_of(backend):
    return [completion.text for completion in backend.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("kind", KINDS)
def test_pickled_backend_is_built_anew_without_its_requests(kind):
    backend = backend_of(kind)
    expected = texts_of(backend)
    stream = backend.stream(PROMPTS[0], greedy(20), request_id="x")
    next(stream)
    for made in (pickle.loads(pickle.dumps(backend)), copy.deepcopy(backend), copy.copy(backend)):
        assert_idle(made)
        assert made.stats.tokens == 0 and made.abort("x") is False
        assert texts_of(made) == expected
        assert type(made._shared.decoder.drafter) is type(backend._shared.decoder.drafter)
    assert copy.copy(backend).model is backend.model
    list(stream)
    assert stream.completion.finish_reason in ("length", "eos")


def test_settings_survive_pickling():
    backend = backend_of("batched", max_batch_size=3, prefill_chunk_size=7, truncate_prompt="left")
    made = pickle.loads(pickle.dumps(backend))
    scheduler = made._shared.decoder._scheduler
    assert (len(scheduler.rows.requests), scheduler.limits.prefill_chunk_size) == (3, 7)
    assert made.generate(["a" * 300], greedy(5))[0].error is None


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprint_does_not_depend_on_what_was_generated(kind):
    backend = backend_of(kind)

    def complete(rows):
        return texts_of(backend)

    before = Hasher.hash(complete)
    stream = backend.stream(PROMPTS[0], PARAMS)
    next(stream)
    assert Hasher.hash(complete) == before
    assert len(texts_of(backend)) == 3 and Hasher.hash(complete) == before
    assert Hasher.hash(backend) != Hasher.hash(backend_of(kind, truncate_prompt="left"))
    stream.close()


@pytest.mark.slow
@pytest.mark.parametrize("num_proc", [None, 2])
def test_data_set_is_mapped_over_a_backend(num_proc, tmp_path):
    backend = backend_of("speculative")
    prompts = random_prompts(6, seed=22)
    expected = [completion.text for completion in backend_of("eager").generate(prompts, PARAMS)]

    def complete(rows):
        return {"text": [completion.text for completion in backend.generate(rows["prompt"], PARAMS)]}

    mapped = Dataset.from_dict({"prompt": prompts}).map(complete, batched=True, batch_size=2, num_proc=num_proc)
    assert mapped["text"][:] == expected
    assert_idle(backend)


# Forks


def in_child(function):
    """Whether `function` returns true in a forked process, which is given a minute."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        status = 1
        try:
            status = 0 if function() else 1
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


class Paused:
    """A backend over a model of its own whose first pass, in a thread, waits in the middle."""

    def __init__(self):
        self.model = make_model(attn_implementation="sdpa").eval()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def hook(self, *args):
        if threading.current_thread() is not threading.main_thread():
            self.reached.set()
            assert self.go_on.wait(60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_backend_works_in_a_process_that_was_forked_inside_a_round_of_another_thread():
    paused = Paused()
    backend = get_generation_backend("speculative", paused.model, TOKENIZER, num_assistant_tokens=2)
    expected, found = texts_of(backend), []
    stream = backend.stream(PROMPTS[0], greedy(30))
    next(stream)
    handle = paused.model.model.layers[0].register_forward_pre_hook(paused.hook)
    threads = Threads(lambda: found.append(texts_of(backend)))
    assert paused.reached.wait(60)
    attention._lock.acquire()  # as if another thread were about to switch
    try:

        def child():
            assert stream.close() is None and backend.abort("unknown") is False
            with pytest.raises(RuntimeError, match="belongs to the process that was forked"):
                next(stream)
            assert paused.model.config._attn_implementation == "sdpa"
            return texts_of(backend) == expected and backend.stats.tokens > 0

        assert in_child(child)
    finally:
        attention._lock.release()
        paused.go_on.set()
        threads.join()
        handle.remove()
    assert found == [expected] and len("".join(stream)) > 0
    assert_idle(backend)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forks_at_any_moment_of_other_threads_decoding():
    backend, stopped = backend_of("batched"), threading.Event()
    expected = texts_of(backend)

    def busy():
        while not stopped.is_set():
            assert texts_of(backend) == expected

    threads = Threads(busy, busy)
    try:
        assert all(in_child(lambda: texts_of(backend) == expected) for _ in range(8))
    finally:
        stopped.set()
        threads.join()
    assert_idle(backend)


def test_forked_processes_of_multiprocessing_share_nothing():
    backend = backend_of("batched")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.map(texts_of, [backend, backend])
    assert found == [texts_of(backend)] * 2


def test_renewing_does_not_keep_backends_alive():
    backend = backend_of("batched")
    shared = backend._shared
    assert shared in shared_decoder._shared_decoders
    before = len(shared_decoder._shared_decoders)
    del backend, shared
    gc.collect()
    assert len(shared_decoder._shared_decoders) < before
