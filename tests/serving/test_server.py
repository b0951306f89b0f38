"""The documented server: answers, refusals, and clients that disconnect while the collector runs in every round."""

import gc
import json
import os
import random
import threading
from collections import Counter

import pytest

from hf_specgen.serving.sampling_params import SamplingParams
from tests.support.serving import backend_of
from tests.support.streaming import Threads, assert_idle

for name in ("starlette", "uvicorn", "httpx"):
    pytest.importorskip(name, reason="`make clients` installs what these tests run against")

import httpx  # noqa: E402

from tests.support.http_server import documented_app, dropping_app, running  # noqa: E402

NUM_STREAMS = int(os.environ.get("NUM_STREAMS", "60"))
NUM_CLIENTS = 6


def body_of(text, **settings):
    return {"model": "m", "messages": [{"role": "user", "content": text}], "stream": True, **settings}


def pieces_of(lines):
    """The texts of an event stream's chunks, and its finish reason."""
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [c["choices"][0]["delta"].get("content", "") for c in chunks], chunks[-1]["choices"][0].get("finish_reason")


def test_server_streams_the_text_of_the_backend():
    backend = backend_of("speculative")
    body = body_of("hi", max_tokens=15, temperature=0)
    (expected,) = backend.generate([body["messages"]], SamplingParams(max_new_tokens=15, temperature=0))
    with running(documented_app(backend)) as url, httpx.stream("POST", url, json=body, timeout=60) as response:
        lines = list(response.iter_lines())
        pieces, reason = pieces_of(lines)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "".join(pieces) == expected.text and reason == "length" and lines[-2] == "data: [DONE]"
    assert_idle(backend)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (body_of("hi", temperature=-1), "temperature"),
        (body_of("hi", best_of=7), "best_of"),
        ({"model": "m"}, "messages"),
        (body_of("hi" * 200), "positions"),
    ],
)
def test_server_refuses_with_a_sentence(body, words):
    backend = backend_of("batched")
    with running(documented_app(backend)) as url:
        response = httpx.post(url, json=body, timeout=60)
    assert response.status_code == 400 and words in response.json()["error"]["message"]
    assert_idle(backend)


def test_openai_client_reads_the_server():
    openai = pytest.importorskip("openai")
    backend = backend_of("batched")
    with running(documented_app(backend)) as url:
        client = openai.OpenAI(base_url=url.removesuffix("/chat/completions"), api_key="none", timeout=60)
        messages = body_of("hi")["messages"]
        stream = client.chat.completions.create(model="m", messages=messages, max_tokens=9, temperature=0, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == backend.generate([messages], SamplingParams(max_new_tokens=9, temperature=0))[0].text


@pytest.mark.slow
@pytest.mark.parametrize("app", [documented_app, dropping_app])
def test_clients_that_disconnect_leave_nothing_behind(app):
    """Every client reads to a random place; one that stays has its whole text, and every slot is free afterwards."""
    backend = backend_of("speculative", max_batch_size=4)
    numbers, ends, lock = iter(range(NUM_STREAMS)), Counter(), threading.Lock()
    params = SamplingParams(max_new_tokens=60, temperature=0, ignore_eos=True)
    prompts = ["".join(random.Random(seed).choices("abcdefgh", k=6)) for seed in range(8)]
    expected = [c.text for c in backend.generate([body_of(prompt)["messages"] for prompt in prompts], params)]
    collections = []

    def collect(*args):
        collections.append(gc.collect(1))
        if len(collections) % 50 == 0:
            gc.collect()

    def client(url, generator):
        with httpx.Client(timeout=120) as session:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                index, num_read = generator.randrange(8), generator.choice([0, 1, 2, 5, 20, 1000])
                body = body_of(prompts[index], max_tokens=60, temperature=0, ignore_eos=True)
                with session.stream("POST", url, json=body) as response:
                    lines = []
                    for line in response.iter_lines() if num_read else ():
                        lines.append(line)
                        if len(lines) == num_read:
                            break
                pieces, reason = pieces_of([*lines, 'data: {"choices": [{"delta": {}}]}'])
                text = "".join(pieces)
                is_whole = num_read == 1000
                assert text == expected[index] if is_whole else expected[index].startswith(text)
                with lock:
                    ends["read to the end" if is_whole else "disconnected"] += 1

    hook = backend.model.register_forward_pre_hook(collect)
    num_alone = backend.stats.tokens
    try:
        with running(app(backend)) as url:
            Threads(*[lambda seed=seed: client(url, random.Random(seed)) for seed in range(NUM_CLIENTS)]).join(600)
    finally:
        hook.remove()
    print(f"\n{NUM_STREAMS} streams, {dict(ends)}, {len(collections)} passes, each with a collection")
    gc.collect()
    backend.abort("nobody")
    assert sum(ends.values()) == NUM_STREAMS and len(ends) == 2
    assert backend.stats.tokens - num_alone < 60 * NUM_STREAMS, "nothing was saved by the disconnects"
    assert_idle(backend)
