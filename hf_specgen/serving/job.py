"""Job: a prompt on its way to a completion. Knows requests and their text, but no tokenizer and no model."""

from dataclasses import dataclass, field

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
    _is_flushed: bool = field(default=False, init=False)

    @property
    def budget(self) -> int:
        """The most tokens that it can get."""
        return 0 if self.request is None else self.request.max_new_tokens

    @property
    def is_done(self) -> bool:
        """Whether no more tokens will come."""
        return self.error is not None or self.request is None or self.request.finish_reason is not None

    def take_piece(self) -> str:
        """The text that has become final since the last call; at the end of the job what was held back."""
        if self.request is None or self.text is None:
            return ""
        stop = self.request.rules.text_stop
        assert stop is not None, "every job follows its text"
        is_last = self.is_done and not self._is_flushed
        self._is_flushed = self.is_done
        return stop.pop_text(self.request.token_ids, is_last)

    def completion(self) -> Completion:
        """The answer, once the job is done."""
        self.take_piece()
        request = self.request
        error = self.error if self.error is not None or request is None else request.error
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
        )
