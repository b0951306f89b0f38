"""Completion: what became of one prompt, as text and as tokens."""

from dataclasses import dataclass, field

from ..engine.logprobs import TokenLogprobs
from ..engine.stats import DecodingStats


@dataclass(frozen=True)
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
            `"stop"` (a stop string), `"eos"` (an id that ends a text), `"length"`, `"aborted"` or `"error"`.
        index (`int`), sample (`int`):
            The number of the prompt in its call, and of the sample among those of the prompt.
        logprobs (`tuple[TokenLogprobs, ...]`, *optional*):
            Per token, if asked for.
        stats ([`DecodingStats`]):
            The counts of this completion.
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
    finish_reason: str
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
