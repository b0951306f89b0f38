"""Completion: what became of one prompt, as text and as tokens."""

from dataclasses import dataclass, field

from ..engine.logprobs import TokenLogprobs
from ..engine.request import FinishReason
from ..engine.stats import DecodingStats


@dataclass(frozen=True, repr=False)
class Completion:
    """
    The answer to a prompt.

    Args:
        prompt (`str`):
            The prompt as the model saw it.
        text (`str`):
            What was generated, without the prompt, special tokens, and what ended it: a stop string or an id.
        token_ids (`tuple[int, ...]`):
            What was generated, with all of these.
        finish_reason (`str`):
            `"stop"` (a stop string), `"eos"` (an id that ends a text), `"length"`, `"time"` (the call's `timeout`),
            `"aborted"` or `"error"`.
        index (`int`), sample (`int`):
            The number of the prompt in its call, and of the sample among those of the prompt.
        logprobs (`tuple[TokenLogprobs, ...]`, *optional*):
            Per token, if asked for, in the `logprobs_mode` that was asked for.
        stats ([`DecodingStats`]):
            The counts of this completion; `stats.summary()` tells them in a sentence.
        error (`Exception`, *optional*):
            What went wrong, with finish reason `"error"`.
        stop_reason (`str` or `int`, *optional*):
            Which stop string, or which id, ended the text.
        num_prompt_tokens (`int`):
            Tokens of the prompt as it was decoded, 0 where it was refused.
    """

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    index: int = 0
    sample: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stats: DecodingStats = field(default_factory=DecodingStats)
    error: Exception | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0

    @property
    def num_generated_tokens(self) -> int:
        """Tokens that were generated, with those that are no part of the text."""
        return len(self.token_ids)

    def __repr__(self) -> str:
        """Without the prompt and what is told per token."""
        told = f"index={self.index}, sample={self.sample}, text={self.text!r}, finish_reason={self.finish_reason!r}"
        if self.stop_reason is not None:
            told += f", stop_reason={self.stop_reason!r}"
        told += f", num_prompt_tokens={self.num_prompt_tokens}, num_generated_tokens={self.num_generated_tokens}"
        return f"Completion({told})" if self.error is None else f"Completion({told}, error={self.error!r})"
