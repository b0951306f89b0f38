"""Streams: texts as they become final, one or many. Reading runs the rounds; to stop reading frees the seats."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .completion import Completion
from .job import Job

if TYPE_CHECKING:
    from .backend import GenerationBackend


class BatchStream(Iterator[tuple[int, str]]):
    """
    Pieces of many texts as they become final, each with the number of its completion. Closing or dropping it frees
    the seats.

    Attributes:
        completions (`list[Completion]`, *optional*): the answers, once the stream has ended.
    """

    def __init__(self, backend: "GenerationBackend", jobs: list[Job]):
        self._backend = backend
        self._jobs = jobs
        self._pieces: list[tuple[int, str]] = []
        self.completions: list[Completion] | None = None

    def __next__(self) -> tuple[int, str]:
        while not self._pieces and self.completions is None:
            self._pieces = self._backend._advance(self._jobs)[::-1]
            if not self._pieces:
                self.completions = [job.completion() for job in self._jobs]
        if self._pieces:
            return self._pieces.pop()
        raise StopIteration

    def close(self) -> None:
        """Ends the requests that have not ended by themselves."""
        self._backend._release(self._jobs)

    def __del__(self) -> None:
        self._backend._release(self._jobs, is_collected=True)


class TextStream(Iterator[str]):
    """
    Pieces of one text as they become final. Closing or dropping it frees the seat.

    Attributes:
        completion ([`Completion`], *optional*): the answer, once the stream has ended.
    """

    def __init__(self, batch: BatchStream):
        self._batch = batch

    def __enter__(self) -> "TextStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the request, if it has not ended by itself."""
        self._batch.close()

    @property
    def completion(self) -> Completion | None:
        return None if self._batch.completions is None else self._batch.completions[0]

    def __next__(self) -> str:
        try:
            return next(self._batch)[1]
        except StopIteration:
            if self.completion is not None and self.completion.error is not None:
                raise self.completion.error from None
            raise
