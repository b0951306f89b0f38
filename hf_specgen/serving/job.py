"""Job: one sample of a prompt on its way to a completion. Call: the jobs of one call, and what is new of them.

Knows requests and their text, but no tokenizer, no model and no thread.
"""

from dataclasses import dataclass, field

from ..engine.logprobs import TokenLogprobs
from ..engine.request import Request
from .completion import Completion
from .detokenizer import TextAssembler


@dataclass(eq=False)
class Job:
    """One sample of one prompt."""

    prompt: str
    request: Request | None  # None where the prompt or its parameters were refused
    text: TextAssembler | None = None
    index: int = 0
    sample: int = 0
    error: Exception | None = None
    wants_logprobs: bool = False
    name: str | None = None  # by which it can be aborted
    is_released: bool = False  # nobody waits for it any more
    _is_flushed: bool = field(default=False, init=False)
    _num_told: int = field(default=0, init=False)  # tokens whose log-probabilities went along with a piece

    @property
    def budget(self) -> int:
        """The most tokens that it can get."""
        return 0 if self.request is None else self.request.max_new_tokens

    @property
    def is_done(self) -> bool:
        """Whether no more tokens will come."""
        return self.error is not None or self.request is None or self.request.finish_reason is not None

    @property
    def final_error(self) -> Exception | None:
        """What it was refused or failed with."""
        return self.error if self.error is not None or self.request is None else self.request.error

    def take_piece(self) -> str:
        """The text that has become final since the last call; at the end of the job what was held back."""
        if self.request is None or self.text is None:
            return ""
        is_last = self.is_done and not self._is_flushed
        self._is_flushed = self.is_done
        return self.text.pop_text(self.request.token_ids, is_last)

    def take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Those of the tokens generated since the last call, if asked for."""
        if self.request is None or not self.wants_logprobs:
            return ()
        start, self._num_told = self._num_told, len(self.request.token_ids)
        return tuple(self.request.logprobs[start : self._num_told])

    def completion(self) -> Completion:
        """The answer, once the job is done."""
        self.take_piece()
        request = self.request
        error = self.final_error
        if request is None or self.text is None:
            return Completion(self.prompt, "", (), "error", self.index, self.sample, error=error)
        return Completion(
            prompt=self.prompt,
            text=self.text.text,
            token_ids=tuple(request.token_ids),
            finish_reason="error" if error is not None else request.finish_reason or "aborted",
            index=self.index,
            sample=self.sample,
            logprobs=tuple(request.logprobs) if self.wants_logprobs else None,
            stats=request.stats,
            error=error,
            stop_reason=self._stop_reason(),
            num_prompt_tokens=len(request.prompt_ids),
        )

    def _stop_reason(self) -> str | int | None:
        """Which stop string or id ended the text."""
        assert self.request is not None and self.text is not None, "asked only of jobs that were accepted"
        reasons = {"stop": self.text.stop_string, "eos": self.request.token_ids[-1:]}
        found = reasons.get(self.request.finish_reason or "")
        return found[0] if isinstance(found, list) else found


@dataclass(frozen=True)
class Piece:
    """
    Text that has become final.

    Args:
        number (`int`): the number of the completion in its call.
        text (`str`): the text.
        logprobs (`tuple[TokenLogprobs, ...]`): of the tokens generated since the piece before, if asked for.
    """

    number: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


class Call:
    """
    The jobs of one call, and which of them have news.

    Args:
        jobs (`list[Job]`): in the order of the answers.

    Attributes:
        error (`Exception`, *optional*): what the first job was refused or failed with.
    """

    def __init__(self, jobs: list[Job]):
        self.jobs = jobs
        self._numbers = {job: number for number, job in enumerate(jobs)}
        self._open = {job for job in jobs if not job.is_done}
        self.error = next((job.error for job in jobs if job.error is not None), None)
        self._news: dict[Job, None] = {}  # got tokens, or ended, since the call was asked for pieces; in this order

    @property
    def num_open(self) -> int:
        """How many jobs have not ended."""
        return len(self._open)

    def note(self, job: Job) -> None:
        """Takes down that a job got tokens or ended."""
        self._news[job] = None
        if job.is_done:
            self._open.discard(job)
            self.error = self.error or job.final_error

    def take_pieces(self) -> list[Piece]:
        """What has become final since the last call. Costs what there is news of, however many jobs there are."""
        pieces = []
        while self._news:
            job = next(iter(self._news))
            if text := job.take_piece():
                pieces.append(Piece(self._numbers[job], text, job.take_logprobs()))
            del self._news[job]
        return pieces
