"""Thousands of requests of all kinds, with aborts and failures: each ends once, and nothing is left behind."""

import random
import threading
from collections import Counter

import pytest

from hf_specgen.serving.backends import get_generation_backend
from hf_specgen.serving.sampling_params import SamplingParams
from tests.support.serving import Fault, drafter_of, target_of
from tests.support.streaming import Threads, assert_idle
from tests.support.tokenizers import LETTERS, TOKENIZER

NUM_REQUESTS, NUM_THREADS = 700, 4  # of each kind


def random_params(generator):
    settings = {
        "max_new_tokens": generator.choice([1, 2, 5, 9, 20]),
        "temperature": generator.choice([0.0, 0.0, 0.7, 1.5]),
        "top_k": generator.choice([0, 5]),
        "top_p": generator.choice([1.0, 0.9]),
        "min_p": generator.choice([0.0, 0.1]),
        "repetition_penalty": generator.choice([1.0, 1.0, 1.3]),
        "frequency_penalty": generator.choice([0.0, 0.0, 0.7]),
        "logit_bias": generator.choice([None, None, {7: 2.0, "300": 5}]),
        "stop": generator.choice([(), (), ("e",), ("qu", "x", "AB")]),
        "stop_token_ids": generator.choice([(), (33, 34)]),
        "ignore_eos": generator.choice([False, True]),
        "min_new_tokens": generator.choice([0, 1]),
        "logprobs": generator.choice([None, None, 0, 2]),
        "seed": generator.choice([None, generator.randint(0, 99)]),
    }
    if generator.random() < 0.03:  # nothing is left to choose
        settings["logit_bias"] = {i: -float("inf") for i in range(64)}
    return SamplingParams(**settings)


def random_prompt(generator):
    if generator.random() < 0.04:
        return generator.choice([[], [999], None, "a" * 300, [{"role": "tool", "content": "x"}], [10**15]])
    text = "".join(generator.choices(LETTERS, k=generator.choice([0, 3, 12, 40])))
    if generator.random() < 0.3:
        text = "You are a helpful thing that answers. " + text
    return [{"role": "user", "content": text}] if generator.random() < 0.1 else text


class Soak:
    """Counts how the requests of several threads end."""

    def __init__(self, backend):
        self.backend = backend
        self.lock = threading.Lock()
        self.numbers = iter(range(NUM_REQUESTS))
        self.ends = Counter()
        self.num_ended = Counter()  # by the number of the request
        self.kept = []  # streams that are dropped later

    def take(self, count):
        with self.lock:
            return [number for _, number in zip(range(count), self.numbers)]

    def ended(self, number, how):
        with self.lock:
            self.ends[how] += 1
            self.num_ended[number] += 1

    def check(self, number, completion, pieces=None):
        assert completion.finish_reason in ("stop", "eos", "length", "aborted", "error")
        assert (completion.error is not None) == (completion.finish_reason == "error")
        assert pieces is None or "".join(pieces) == completion.text
        assert completion.finish_reason != "length" or completion.token_ids
        self.ended(number, completion.finish_reason)

    def work(self, seed):
        generator = random.Random(seed)
        ways = [self.generate, self.stream_batch, self.stream, self.stop_reading, self.abort]
        while numbers := self.take(generator.choice([1, 1, 2, 7])):
            generator.choice(ways)(generator, numbers)

    def generate(self, generator, numbers):
        prompts = [random_prompt(generator) for _ in numbers]
        completions = self.backend.generate(prompts, [random_params(generator) for _ in numbers])
        for number, completion in zip(numbers, completions, strict=True):
            self.check(number, completion)

    def stream_batch(self, generator, numbers):
        stream = self.backend.stream_batch(
            [random_prompt(generator) for _ in numbers], [random_params(generator) for _ in numbers]
        )
        pieces = {place: [] for place in range(len(numbers))}
        for place, piece in stream:
            pieces[place].append(piece)
        for place, (number, completion) in enumerate(zip(numbers, stream.completions, strict=True)):
            self.check(number, completion, pieces[place])

    def opened(self, generator, number):
        try:
            return self.backend.stream(random_prompt(generator), random_params(generator), request_id=str(number))
        except (ValueError, TypeError):
            self.ended(number, "refused")

    def stream(self, generator, numbers):
        for number in numbers:
            if stream := self.opened(generator, number):
                pieces = []
                try:
                    pieces.extend(stream)
                except (Fault, ValueError):
                    self.ended(number, "raised")
                else:
                    self.check(number, stream.completion, pieces)

    def stop_reading(self, generator, numbers):
        for number in numbers:
            if stream := self.opened(generator, number):
                try:
                    for _ in range(generator.randint(0, 3)):
                        next(stream, None)
                except (Fault, ValueError):
                    pass
                if generator.random() < 0.5:
                    stream.close()
                self.ended(number, "dropped")

    def abort(self, generator, numbers):
        streams = [(number, stream) for number in numbers if (stream := self.opened(generator, number))]
        for number, stream in streams:
            pieces = []
            try:
                pieces += [piece for piece in [next(stream, None)] if piece]
                self.backend.abort(str(number))
                pieces.extend(stream)
            except (Fault, ValueError):
                self.ended(number, "raised")
            else:
                self.check(number, stream.completion, pieces)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["speculative", "dspark", "lookup"])
def test_every_request_ends_once_and_nothing_is_left_behind(monkeypatch, kind):
    settings = {"max_batch_size": 8, "prefill_chunk_size": 16, "max_tokens_in_cache": 2000}
    if kind != "lookup":
        settings |= {"draft_model": drafter_of("llama", kind), "num_assistant_tokens": 3}
    backend = get_generation_backend(kind.replace("lookup", "speculative"), target_of(), TOKENIZER, **settings)
    num_threads, generator, forward = threading.active_count(), random.Random(0), target_of().forward

    def fails_at_times(*args, **kwargs):
        if generator.random() < 0.005:
            raise Fault
        return forward(*args, **kwargs)

    soak = Soak(backend)
    with monkeypatch.context() as patch:
        patch.setattr(target_of(), "forward", fails_at_times)
        Threads(*[lambda seed=seed: soak.work(seed) for seed in range(NUM_THREADS)]).join()
    print(
        f"\n{dict(soak.ends)}, {backend.stats.target_forwards} passes, acceptance {backend.stats.acceptance_rate:.2f}"
    )
    assert soak.num_ended == Counter(range(NUM_REQUESTS))
    assert {"stop", "eos", "length", "aborted", "error", "raised", "refused", "dropped"} <= set(soak.ends)
    assert 0 < backend.stats.acceptance_rate < 1
    assert threading.active_count() == num_threads
    assert_idle(backend)
    params = SamplingParams(max_new_tokens=9, temperature=0)
    fresh = get_generation_backend("eager", target_of(), TOKENIZER)
    assert [c.text for c in backend.generate(["hi", "abc"], params)] == [
        c.text for c in fresh.generate(["hi", "abc"], params)
    ]
