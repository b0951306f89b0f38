"""Streams: texts as they become final, one or many. Reading runs the rounds; to stop reading frees the slots."""

from collections.abc import Callable, Iterator

from ..engine.logprobs import TokenLogprobs
from .completion import Completion
from .job import Call, Job, Piece


class BatchStream(Iterator[tuple[int, str]]):
    """
    Pieces of many texts as they become final, each with the number of its completion. Closing or dropping it frees
    the slots, in any thread and at any time: the garbage collector may do so inside a round.

    Args:
        call (`Call`):
            The jobs whose texts are read.
        advance (`Callable[[Call], list[Piece]]`):
            Runs rounds until there are pieces, and returns none once all jobs have ended.
        release (`Callable[[list[Job]], None]`):
            Ends jobs without waiting.

    Attributes:
        completions (`list[Completion]`, *optional*): the answers, once the stream has ended.
        logprobs (`tuple[TokenLogprobs, ...]`): if asked for, of the tokens that came since the piece before the last
            one. Tokens behind a text's last piece, such as the id that ended it, have theirs in the completion only.
    """

    def __init__(self, call: Call, advance: Callable[[Call], list[Piece]], release: Callable[[list[Job]], None]):
        self._call = call
        self._advance = advance
        self._release = release
        self._pieces: list[Piece] = []  # the next one is the last
        self.completions: list[Completion] | None = None
        self.logprobs: tuple[TokenLogprobs, ...] = ()

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __next__(self) -> tuple[int, str]:
        if not self._pieces and self.completions is None:
            self._pieces = self._advance(self._call)[::-1]
            if not self._pieces:
                self.completions = [job.completion() for job in self._call.jobs]
        if not self._pieces:
            raise StopIteration
        piece = self._pieces.pop()
        self.logprobs = piece.logprobs
        return piece.number, piece.text

    def close(self) -> None:
        """Ends the requests that have not ended by themselves."""
        self._release(self._call.jobs)

    def __del__(self) -> None:
        self.close()


class TextStream(Iterator[str]):
    """
    Pieces of one text as they become final. Closing or dropping it frees the slot, as with [`BatchStream`].

    Attributes:
        completion ([`Completion`], *optional*): the answer, once the stream has ended.
        logprobs (`tuple[TokenLogprobs, ...]`): of the tokens that came with the last piece, if asked for.
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
        """The answer, once the stream has ended."""
        return None if self._batch.completions is None else self._batch.completions[0]

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the tokens that came with the last piece, if asked for."""
        return self._batch.logprobs

    def __next__(self) -> str:
        try:
            return next(self._batch)[1]
        except StopIteration:
            if self.completion is not None and self.completion.error is not None:
                raise self.completion.error from None
            raise
