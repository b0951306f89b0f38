"""Request: one prompt's life from waiting to its finish reason; PaddedBatch: requests that share their rules.

Knows nothing of models, caches or drafting.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from ..logits_process.token_counts import TokenCounts
from ..logits_process.token_penalties import TokenPenalties
from .stats import DecodingStats

MAX_SEED = 2**32 - 1  # of torch's CPU generator
GROWTH = 128  # columns


class TextStop(Protocol):
    """What finds stop strings in the text of one request."""

    def first_stop(self, token_ids_so_far: list[int], new_token_ids: list[int]) -> int | None:
        """The number of new tokens, at least 1, with which a stop string is complete, or None."""


@dataclass(frozen=True)
class DecodingRules:
    """
    How the tokens of a request are chosen and what ends it, its budget apart.

    Args:
        logits_processor (`LogitsProcessorList`, *optional*):
            Processors and warpers, applied in this order.
        stopping_criteria (`StoppingCriteriaList`, *optional*):
            Criteria other than length and eos.
        eos_token_ids (`frozenset[int]`, *optional*):
            Ids that end the row.
        do_sample (`bool`, *optional*, defaults to `False`):
            Whether to sample; otherwise the best token is taken.
        pad_token_id (`int`, *optional*, defaults to 0):
            What stands where a row has no token.
        text_stop ([`TextStop`], *optional*):
            Puts one request's text together and finds stop strings in it; not to be shared.
    """

    logits_processor: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    stopping_criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    eos_token_ids: frozenset[int] = frozenset()
    do_sample: bool = False
    pad_token_id: int = 0
    text_stop: TextStop | None = None

    def __post_init__(self) -> None:
        for name in ("logits_processor", "stopping_criteria"):
            entries = getattr(self, name)
            if not isinstance(entries, list) or not all(callable(entry) for entry in entries):
                raise TypeError(f"`{name}` has to be a list of callables, but is {entries!r}.")
        if not isinstance(self.eos_token_ids, Set) or not all(type(i) is int for i in self.eos_token_ids):
            raise TypeError(f"`eos_token_ids` has to be a set of ints, but is {self.eos_token_ids!r}.")
        if not isinstance(self.do_sample, bool):
            raise TypeError(f"`do_sample` has to be a bool, but is {self.do_sample!r}.")
        if type(self.pad_token_id) is not int:
            raise TypeError(f"`pad_token_id` has to be an int, but is {self.pad_token_id!r}.")


@dataclass(frozen=True)
class TokenLogprobs:
    """
    How likely a token was under the model's own scores, before all processors.

    Args:
        token_id (`int`), logprob (`float`): the token and the logarithm of its probability.
        top (`tuple[tuple[int, float], ...]`): the same of the likeliest tokens, the best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """What `logits` of shape `(positions, vocab)` say of the tokens chosen there, and of the `num_top` likeliest."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    values, ids = (part.tolist() for part in logprobs.topk(num_top, dim=-1))
    tops = [tuple(zip(*top)) for top in zip(ids, values)]
    return [TokenLogprobs(*entry) for entry in zip(token_ids, chosen, tops)]


class PaddedBatch:
    """
    Ids of requests that share their rules, laid out as `generate` lays them out: left-padded prompts, then what was
    generated, then padding. Foreign processors and criteria are called on this layout, so row indices and lengths
    that they carry stay right. Without processors and criteria nothing reads the layout, and it is not kept up.

    Args:
        prompt_ids (`torch.LongTensor` of shape `(rows, prompt_length)`):
            The prompts, left-padded.
        max_new_tokens (`int`):
            The most tokens that a row can get.
        rules ([`DecodingRules`]):
            The rules of every row.
    """

    def __init__(self, prompt_ids: Tensor, max_new_tokens: int, rules: DecodingRules):
        rows, self.prompt_length = prompt_ids.shape
        self.max_length = self.prompt_length + max_new_tokens
        self.rules = rules
        self._is_read = bool(rules.logits_processor or rules.stopping_criteria)
        self._is_started = False
        self.token_ids = prompt_ids  # grows with what is generated, since budgets are often left to eos
        self._counts: dict[int, TokenCounts] = {}

    def start(self, device: torch.device) -> None:
        """Moves the ids to `device` and counts the prompts, once."""
        if self._is_started:
            return
        self._is_started = True
        self.token_ids = self.token_ids.to(device)
        self._counts = {
            id(processor): processor.make_counts(self.token_ids[:, : self.prompt_length])
            for processor in self.rules.logits_processor
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
            padding = self.token_ids.new_full((len(self.token_ids), missing + GROWTH), self.rules.pad_token_id)
            self.token_ids = torch.cat([self.token_ids, padding], dim=1)

    def commit(self, row: int, num_committed: int, token_ids: list[int]) -> None:
        """Writes and counts generated tokens of a row; what was drafted behind them becomes padding again."""
        if not self._is_read:
            return
        start = self.prompt_length + num_committed
        self._grow(start + len(token_ids))
        self.token_ids[row, start:] = self.rules.pad_token_id
        self.token_ids[row, start : start + len(token_ids)] = torch.tensor(token_ids, device=self.token_ids.device)
        for counts in self._counts.values():
            counts.add(row, token_ids)


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
        batch ([`PaddedBatch`], *optional*), batch_row (`int`):
            Where the request's ids stand among requests that share processors. By default the request stands alone:
            processors see its own ids without padding, and their failure fails this request only.
        keep_scores, keep_logits (`bool`, *optional*, defaults to `False`):
            Whether to keep, per emitted token, the processed and the raw scores of shape `(vocab,)`.
        num_logprobs (`int`, *optional*):
            Keep [`TokenLogprobs`] per emitted token, with this many alternatives.

    Attributes:
        token_ids (`list[int]`): what was generated so far.
        finish_reason (`str`, *optional*): `"eos"`, `"length"`, `"stop"` (a stop string), `"time"`, `"criteria"` (any
            other stopping criterion), `"error"` or `"aborted"`; None while the request is unfinished.
        number (`int`): its place in the order in which a decoder was given requests, -1 before.
        stats ([`DecodingStats`]): the request's own counts, of its rounds and tokens.
        error (`Exception`, *optional*): what ended a request with finish reason `"error"`.

    Raises:
        `ValueError` or `TypeError`: if the prompt is empty or not made of ids, or the budget is below 1.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    rules: DecodingRules = field(default_factory=DecodingRules)
    seed: int | None = None
    batch: PaddedBatch = None  # type: ignore[assignment]  # made in __post_init__
    batch_row: int = 0
    keep_scores: bool = False
    keep_logits: bool = False
    num_logprobs: int | None = None
    token_ids: list[int] = field(default_factory=list, init=False)
    finish_reason: str | None = field(default=None, init=False)
    number: int = field(default=-1, init=False)
    error: Exception | None = field(default=None, init=False)
    scores: list[Tensor] = field(default_factory=list, init=False)
    logits: list[Tensor] = field(default_factory=list, init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    stats: DecodingStats = field(default_factory=DecodingStats, init=False)
    state: dict[str, Any] = field(default_factory=dict, init=False)  # what a drafter remembers of this request

    def __post_init__(self) -> None:
        if not isinstance(self.max_new_tokens, int) or isinstance(self.max_new_tokens, bool):
            raise TypeError(f"`max_new_tokens` has to be an int, but is {self.max_new_tokens!r}.")
        if self.max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` has to be at least 1, but is {self.max_new_tokens}.")
        if not isinstance(self.prompt_ids, Sequence):
            raise TypeError(f"`prompt_ids` has to be a list of ints, but is {self.prompt_ids!r}.")
        if len(self.prompt_ids) == 0:
            raise ValueError("`prompt_ids` is empty: decoding needs at least one token to start from.")
        if not all(type(token_id) is int and token_id >= 0 for token_id in self.prompt_ids):
            raise ValueError(f"`prompt_ids` has to hold non-negative ints, but is {self.prompt_ids!r}.")
        if self.seed is not None and type(self.seed) is not int:
            raise TypeError(f"`seed` has to be an int, but is {self.seed!r}.")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"`seed` has to be between 0 and {MAX_SEED}, but is {self.seed}.")
        if not isinstance(self.rules, DecodingRules):
            raise TypeError(f"`rules` has to be `DecodingRules`, but is {self.rules!r}.")
        if self.batch is None and self.batch_row != 0:
            raise ValueError(f"`batch_row` is {self.batch_row}, but a request without `batch` stands in row 0.")
        self.is_alone = self.batch is None  # a failing processor then concerns this request only
        if self.is_alone:
            self.batch = PaddedBatch(torch.tensor([self.prompt_ids]), self.max_new_tokens, self.rules)
        self._generator: torch.Generator | None = None

    def start(self, device: torch.device) -> None:
        """Makes what decoding needs: the ids on `device` and the random numbers."""
        self.batch.start(device)
        if self.rules.do_sample:
            seed = self.seed if self.seed is not None else int(torch.randint(MAX_SEED, ()))
            self._generator = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> Tensor:
        """The request's next `count` uniform numbers, on the CPU."""
        return torch.rand(count, generator=self._generator)

    @property
    def num_committed(self) -> int:
        """Tokens of the prompt and generated ones."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """What is left of the budget."""
        return self.max_new_tokens - len(self.token_ids)

    def committed_from(self, start: int) -> list[int]:
        """The committed ids from index `start` on."""
        offset = start - len(self.prompt_ids)
        return self.token_ids[offset:] if offset >= 0 else [*self.prompt_ids[start:], *self.token_ids]

    def commit(self, token_ids: list[int]) -> None:
        """Appends generated tokens."""
        self.batch.commit(self.batch_row, len(self.token_ids), token_ids)
        self.token_ids.extend(token_ids)
