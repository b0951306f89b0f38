"""Backends over bytes, whose text is full of broken characters; threads that read them."""

import functools
import random
import threading

from hf_specgen import get_generation_backend
from hf_specgen.serving.detokenizer import REPLACEMENT
from hf_specgen.serving.sampling_params import SamplingParams
from tests.support.dspark_models import bigram_target, fitted_drafter
from tests.support.models import noisy_copy
from tests.support.tokenizers import NUM_BYTES, byte_tokenizer


@functools.cache
def byte_models():
    """The target of bytes, and its drafters."""
    target = bigram_target(vocab_size=NUM_BYTES + 1, eos_token_id=NUM_BYTES - 1)
    target.generation_config.eos_token_id = NUM_BYTES - 1
    return {"target": target, "speculative": noisy_copy(target), "dspark": fitted_drafter(target)}


def byte_backend_of(kind, **settings):
    if kind in ("speculative", "dspark"):
        settings |= {"draft_model": byte_models()[kind], "num_assistant_tokens": 3}
    return get_generation_backend(
        kind.replace("lookup", "speculative"), byte_models()["target"], byte_tokenizer(), **settings
    )


def is_free(lock):
    """Whether another thread could have the lock now."""
    found = []

    def ask():
        found.append(lock.try_run(lambda: None))
        if lock._turn.acquire(blocking=False):
            lock._turn.release()
            found.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found == [True, True] and not lock._threads


def assert_idle(backend):
    """Everything is as at the start: no slot, no memory, no memory of a request."""
    shared = backend._shared
    assert (shared._open, shared._named, list(shared._released)) == ({}, {}, [])
    assert not shared.decoder.has_unfinished and is_free(shared._lock)
    rows = shared.decoder.rows
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


def random_byte_prompts(count, seed=0):
    generator = random.Random(seed)
    texts = ["hi", "नमस्ते", "a😀", "tu e\u0301", "€" * 9, "cab" * 7]
    return ["".join(generator.choices(texts, k=generator.randint(1, 3))) for _ in range(count)]


def endless(**settings):
    return random_params(3, max_new_tokens=120, ignore_eos=True, stop=(), temperature=0.7, **settings)


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

    def join(self, timeout=60):
        for thread in self.threads:
            thread.join(timeout)
            assert not thread.is_alive(), "a thread hangs"
        if self.errors:
            raise self.errors[0]
