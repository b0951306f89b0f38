"""AsyncTextStream: a text stream for asyncio. Rounds run in worker threads of the loop, which stays free meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable

from .completion import Completion
from .streams import TextStream


class AsyncTextStream(AsyncIterator[str]):
    """
    Pieces of one text as they become final. Cancelling a task that reads it, leaving its `async with`, closing or
    dropping it frees the slot; a round that is being run meanwhile ends first, in its worker thread.

    Args:
        open_stream (`Callable[[], TextStream]`):
            Submits the request, when the stream is first read. What it raises, the first piece raises.

    Attributes:
        completion ([`Completion`], *optional*): the answer, once the stream has ended.
    """

    def __init__(self, open_stream: Callable[[], TextStream]):
        self._open_stream = open_stream
        self._stream: TextStream | None = None
        self._is_closed = False

    async def __aenter__(self) -> "AsyncTextStream":
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    async def __anext__(self) -> str:
        try:
            piece = await asyncio.to_thread(self._read)
        except asyncio.CancelledError:
            self.close()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def close(self) -> None:
        """Ends the request, if it has not ended by itself. Never waits."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.close()

    @property
    def completion(self) -> Completion | None:
        """The answer, once the stream has ended."""
        return None if self._stream is None else self._stream.completion

    def _read(self) -> str | None:
        """The next piece, None at the end; in a worker thread."""
        if self._is_closed:
            return None
        if self._stream is None:
            self._stream = self._open_stream()
            if self._is_closed:  # while it was being opened
                self._stream.close()
        return next(self._stream, None)
