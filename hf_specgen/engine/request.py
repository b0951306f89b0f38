"""Request: one prompt's life from waiting to its finish reason; PaddedBatch: requests laid out as `generate` does.

Knows nothing of models, caches or drafting.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ..arguments import check_count, checked_integer
from ..logits_process.token_counts import TokenCounts
from ..logits_process.token_penalties import TokenPenalties
from .errors import released
from .logprobs import LOGPROBS_MODES, LogprobsMode, TokenLogprobs, token_logprobs
from .memory import Memory
from .noise import MAX_SEED, Noise
from .rules import DecodingRules
from .stats import DecodingStats

FinishReason = Literal["eos", "length", "stop", "time", "criteria", "error", "aborted"]
RequestStatus = Literal["new", "waiting", "prefilling", "decoding", "finished"]
GROWTH = 128  # columns


class TextFollower(Protocol):
    """What follows the text of one request and finds stop strings in it."""

    def first_stop(self, token_ids_so_far: list[int], new_token_ids: list[int]) -> int | None:
        """The number of new tokens, at least 1, with which a stop string is complete, or None."""


class PaddedBatch:
    """
    Requests laid out as `generate` lays them out: left-padded prompts, then what was generated, then padding. Foreign
    processors and criteria are called on this layout, so row indices and lengths that they carry stay right. Without
    processors and criteria nothing reads the layout, and it is not kept up.

    Args:
        prompt_ids (`torch.LongTensor` of shape `(rows, prompt_length)`):
            The prompts, left-padded.
        max_new_tokens (`int`):
            The most tokens that a row can get.
        pad_token_id (`int`, *optional*, defaults to 0):
            What stands where a row has no token.

    Attributes:
        requests (`list[Request | None]`): the request of each row. They share their rules.
        num_judged (`int`): the number of generated tokens up to which the stopping criteria have been asked.
    """

    def __init__(self, prompt_ids: Tensor, max_new_tokens: int, pad_token_id: int = 0):
        rows, self.prompt_length = prompt_ids.shape
        self.max_length = self.prompt_length + max_new_tokens
        self.pad_token_id = checked_integer("pad_token_id", pad_token_id)
        self.token_ids = prompt_ids  # grows with what is generated, since budgets are often left to eos
        self.requests: list[Request | None] = [None] * rows
        self.num_judged = 0
        self._is_read = False
        self._is_started = False
        self._counts: dict[int, TokenCounts] = {}
        self.memories: dict[int, Memory] = {}  # of processors by their ids

    def remember(self, processors: Iterable[LogitsProcessor]) -> None:
        """
        Keeps the states of processors of which nothing is known, so that candidates that are refused leave nothing.

        Raises:
            `ValueError`: if the state of one cannot be taken back.
        """
        self.memories = self.memories or {id(processor): Memory(processor) for processor in processors}

    def start(self, device: torch.device, rules: DecodingRules) -> None:
        """Moves the ids to `device` and counts the prompts, once."""
        if self._is_started:
            return
        self._is_started = True
        self._is_read = bool(rules.logits_processor or rules.stopping_criteria)
        self.token_ids = self.token_ids.to(device)
        self._counts = {
            id(processor): processor.make_counts(self.token_ids[:, : self.prompt_length])
            for processor in rules.logits_processor
            if isinstance(processor, TokenPenalties)
        }

    def counts(self, processor: TokenPenalties) -> TokenCounts:
        """The occurrences that `processor` counts, committed tokens only."""
        return self._counts[id(processor)]

    def draft(self, row: int, num_committed: int, token_ids: Tensor) -> None:
        """Writes uncommitted tokens behind the `num_committed` generated ones of a row."""
        if not self._is_read:
            return
        start = self.prompt_length + num_committed
        end = min(start + len(token_ids), self.max_length)
        self._grow(end)
        self.token_ids[row, start:end] = token_ids[: end - start]

    def _grow(self, width: int) -> None:
        missing = width - self.token_ids.shape[1]
        if missing > 0:
            padding = self.token_ids.new_full((len(self.token_ids), missing + GROWTH), self.pad_token_id)
            self.token_ids = torch.cat([self.token_ids, padding], dim=1)

    def commit(self, row: int, num_committed: int, token_ids: list[int]) -> None:
        """Writes and counts generated tokens of a row; what was drafted behind them becomes padding again."""
        if not self._is_read:
            return
        start = self.prompt_length + num_committed
        self._grow(start + len(token_ids))
        self.cut(row, num_committed)
        self.token_ids[row, start : start + len(token_ids)] = torch.tensor(
            token_ids, dtype=torch.long, device=self.token_ids.device
        )
        for counts in self._counts.values():
            counts.add(row, token_ids)
        for memory in self.memories.values():
            memory.commit(row, len(token_ids))

    def cut(self, row: int, num_committed: int) -> None:
        """Makes what stands behind the first `num_committed` generated tokens of a row padding again."""
        if self._is_read:
            self.token_ids[row, self.prompt_length + num_committed :] = self.pad_token_id


@dataclass(eq=False)
class Request:
    """
    One prompt and what became of it.

    Args:
        prompt_ids (`list[int]`):
            The prompt, without padding.
        max_new_tokens (`int`):
            The budget, at least 1.
        rules ([`DecodingRules`], *optional*):
            How tokens are chosen; greedy by default.
        seed (`int`, *optional*):
            Seeds this request's own random numbers, so that its text does not depend on what else is in the batch.
            Drawn from torch's default generator if the request samples and none is given.
        batch (`PaddedBatch`, *optional*), batch_row (`int`):
            Where the request's ids stand among requests that share their rules. By default the request stands alone:
            processors see its own ids without padding, and their failure fails this request only.
        text (`TextFollower`, *optional*):
            Finds stop strings in this request's text; not to be shared.
        keep_scores, keep_logits (`bool`, *optional*, defaults to `False`):
            Whether to keep, per emitted token, the processed and the raw scores of shape `(vocab,)`.
        num_logprobs (`int`, *optional*):
            Keep [`TokenLogprobs`] per emitted token, with this many alternatives.
        logprobs_mode (`str`, *optional*, defaults to `"raw"`):
            Which distribution they tell of: `"raw"`, the model's own, or `"processed"`, after all processors and
            warpers.

    Attributes:
        token_ids (`list[int]`): what was generated so far.
        status (`str`): `"new"`, `"waiting"` (for a slot), `"prefilling"`, `"decoding"` or `"finished"`.
        finish_reason (`str`, *optional*): `"eos"`, `"length"`, `"stop"` (a stop string), `"time"`, `"criteria"` (any
            other stopping criterion), `"error"` or `"aborted"`; None while the request is unfinished.
        number (`int`): its place in the order in which a decoder was given requests, -1 before.
        stats ([`DecodingStats`]): the request's own counts, of its rounds and tokens.
        error (`Exception`, *optional*): what ended a request with finish reason `"error"`.

    Raises:
        `ValueError` or `TypeError`: if the prompt is empty or not made of ids, the budget is below 1, or the other
            requests of `batch` follow other rules.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    rules: DecodingRules = field(default_factory=DecodingRules)
    seed: int | None = None
    batch: PaddedBatch = None  # type: ignore[assignment]  # made in __post_init__
    batch_row: int = 0
    text: TextFollower | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    num_logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    token_ids: list[int] = field(default_factory=list, init=False)
    status: RequestStatus = field(default="new", init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    number: int = field(default=-1, init=False)
    error: Exception | None = field(default=None, init=False)
    scores: list[Tensor] = field(default_factory=list, init=False)
    logits: list[Tensor] = field(default_factory=list, init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    stats: DecodingStats = field(default_factory=DecodingStats, init=False)
    noise: Noise | None = field(default=None, init=False)  # of a request that samples, from its start on
    state: dict[str, Any] = field(default_factory=dict, init=False)  # what a drafter remembers of this request

    def __post_init__(self) -> None:
        self.max_new_tokens = check_count("max_new_tokens", self.max_new_tokens)
        self.prompt_ids = _checked_prompt(self.prompt_ids)
        if self.seed is not None:
            self.seed = check_count("seed", self.seed, 0, MAX_SEED)
        if not isinstance(self.rules, DecodingRules):
            raise TypeError(f"`rules` has to be `DecodingRules`, but is {self.rules!r}.")
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"`logprobs_mode` has to be one of {LOGPROBS_MODES}, but is {self.logprobs_mode!r}.")
        self.is_alone = self.batch is None  # a failing processor then concerns this request only
        if self.is_alone:
            self.batch = PaddedBatch(torch.tensor([self.prompt_ids]), self.max_new_tokens)
        check_count("batch_row", self.batch_row, 0, len(self.batch.requests) - 1)
        if any(other is not None and other.rules is not self.rules for other in self.batch.requests):
            raise ValueError("`rules` has to be the same object for all requests of a `batch`.")
        self.batch.requests[self.batch_row] = self

    def start(self, device: torch.device) -> None:
        """Makes what decoding needs: the ids on `device` and the random numbers."""
        self.batch.start(device, self.rules)
        if self.rules.do_sample:
            self.noise = Noise(self.seed)

    @property
    def num_committed(self) -> int:
        """Tokens of the prompt and generated ones."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """What is left of the budget."""
        return self.max_new_tokens - len(self.token_ids)

    def committed_from(self, start: int, count: int | None = None) -> list[int]:
        """The committed ids from index `start` on, at most `count` of them if that is given."""
        end = self.num_committed if count is None else start + count
        offset = len(self.prompt_ids)
        if start >= offset:
            return self.token_ids[start - offset : end - offset]
        return [*self.prompt_ids[start:end], *self.token_ids[: max(end - offset, 0)]]

    def commit(self, token_ids: list[int]) -> None:
        """Appends generated tokens. The round is over, and its random numbers are used up."""
        self.batch.commit(self.batch_row, len(self.token_ids), token_ids)
        self.token_ids.extend(token_ids)
        if self.noise is not None:
            self.noise.commit()

    def roll_back(self) -> None:
        """Forgets a round that failed: what was drafted in it, and which random numbers it took."""
        self.batch.cut(self.batch_row, len(self.token_ids))
        for memory in self.batch.memories.values():
            memory.commit(self.batch_row, 0)
        if self.noise is not None:
            self.noise.roll_back()

    def keep(self, scores: Tensor, logits: Tensor, token_ids: list[int]) -> None:
        """Keeps what was asked for of the scores, of shape `(positions, vocab)`, from which new tokens were chosen."""
        count = len(token_ids)
        if self.keep_scores:
            self.scores.extend(scores[:count].clone().unbind())
        if self.keep_logits:
            self.logits.extend(logits[:count].to(torch.float32, copy=True).unbind())
        if self.num_logprobs is not None and count > 0:
            told = scores if self.logprobs_mode == "processed" else logits
            self.logprobs.extend(token_logprobs(told[:count], token_ids, self.num_logprobs))

    def finish(self, reason: FinishReason, num_tokens: int | None = None, error: Exception | None = None) -> None:
        """Ends the request; it keeps its first `num_tokens` tokens, by default all."""
        if num_tokens is not None and num_tokens < len(self.token_ids):
            self.batch.cut(self.batch_row, num_tokens)
            for kept in (self.token_ids, self.scores, self.logits, self.logprobs):
                del kept[num_tokens:]
        for memory in self.batch.memories.values():
            memory.settle(self.batch_row)
        self.status, self.finish_reason = "finished", reason
        self.error = None if error is None else released(error)


def _checked_prompt(prompt_ids: Sequence[int]) -> list[int]:
    if not isinstance(prompt_ids, Sequence):
        raise TypeError(f"`prompt_ids` has to be a list of ints, but is {prompt_ids!r}.")
    if len(prompt_ids) == 0:
        raise ValueError("`prompt_ids` is empty: decoding needs at least one token to start from.")
    if isinstance(prompt_ids, list) and all(type(token_id) is int and token_id >= 0 for token_id in prompt_ids):
        return prompt_ids
    try:
        return [check_count("prompt_ids", token_id, 0) for token_id in prompt_ids]
    except (TypeError, ValueError) as error:
        raise ValueError(f"`prompt_ids` has to hold non-negative ints, but is {prompt_ids!r}.") from error
