"""Streams for asyncio: the texts of `generate`, a loop that is never blocked, slots that are free after a cancel."""

import asyncio
import gc
import threading

import pytest

from tests.support.serving import backend_of, greedy, random_prompts
from tests.support.streaming import assert_idle, byte_backend_of, endless


async def joined(stream):
    return "".join([piece async for piece in stream])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eager", "batched", "speculative"])
def test_tasks_side_by_side_read_the_texts_of_generate(kind):
    prompts = random_prompts(12)
    expected = [completion.text for completion in backend_of(kind).generate(prompts, greedy())]
    backend = backend_of(kind)
    num_threads = threading.active_count()

    async def read_all():
        streams = [backend.astream(prompt, greedy()) for prompt in prompts]
        assert streams[0].completion is None
        texts = await asyncio.gather(*(joined(stream) for stream in streams))
        return texts, [stream.completion for stream in streams]

    texts, completions = asyncio.run(read_all())
    assert list(texts) == expected == [completion.text for completion in completions]
    assert_idle(backend)
    assert threading.active_count() == num_threads


@pytest.fixture
def held():
    """A backend whose passes wait, once `gate` is cleared; `entered` says that one waits."""
    backend, gate, entered = byte_backend_of("batched", max_batch_size=1), threading.Event(), threading.Event()
    gate.set()

    def wait(module, args):
        if not gate.is_set():
            entered.set()
            assert gate.wait(60), "nobody opened the gate"

    hook = backend.model.register_forward_pre_hook(wait)
    yield backend, gate, entered
    hook.remove()


async def until(event):
    assert await asyncio.to_thread(event.wait, 60)


@pytest.mark.parametrize("num_pieces", [0, 1, 3])
def test_a_cancelled_task_frees_the_slot_although_a_pass_is_running(held, num_pieces):
    backend, gate, entered = held

    async def cancel_while_a_pass_runs():
        stream = backend.astream("hi", endless())
        for _ in range(num_pieces):
            await anext(stream)
        gate.clear()
        task = asyncio.create_task(anext(stream))
        await until(entered)  # the loop runs on although the pass does not
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        assert await joined(stream) == ""
        return await joined(backend.astream("hi", endless()))

    text = asyncio.run(cancel_while_a_pass_runs())
    assert text == byte_backend_of("batched").generate(["hi"], endless())[0].text
    assert_idle(backend)


def test_leaving_the_block_or_dropping_the_stream_frees_the_slot():
    backend = byte_backend_of("batched", max_batch_size=1)

    async def leave():
        async with backend.astream("hi", endless()) as stream:
            await anext(stream)
        assert stream.completion is None
        async for _ in backend.astream("hi", endless()):
            break

    asyncio.run(leave())
    gc.collect()
    assert_idle(backend)


def test_a_stream_that_is_closed_before_it_is_read_submits_nothing():
    backend = backend_of("batched")

    async def close():
        stream = backend.astream("ab", greedy())
        stream.close()
        return await joined(stream)

    assert asyncio.run(close()) == ""
    assert backend.stats.tokens == 0
    assert_idle(backend)


def test_a_refused_request_raises_when_the_stream_is_read():
    backend = backend_of("batched")

    async def read():
        stream = backend.astream("ab", greedy(n=2))
        with pytest.raises(ValueError, match="stream_batch"):
            await anext(stream)

    asyncio.run(read())
    assert_idle(backend)
