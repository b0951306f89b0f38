"""Rows: requests side by side with their caches; one forward pass over them.

Between rounds every cache holds all committed tokens of its row but the last one (the anchor); a drafter's cache may
lag behind. Knows nothing of scores and of how candidates are found.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..layers.attention import MAX_POSITIONS
from ..layers.slot_cache import SlotCache
from .model_facts import execution_device
from .noise import Noise
from .request import Request


def forward(
    model: PreTrainedModel, cache: SlotCache, rows: slice, token_ids: Tensor, num_tokens: Tensor, **model_kwargs: Any
) -> ModelOutput:
    """
    One forward pass over new tokens of consecutive rows; the cache counts them as written.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            A causal language model.
        cache ([`SlotCache`]):
            The model's cache.
        rows (`slice`):
            The rows that the tokens belong to.
        token_ids (`torch.LongTensor` of shape `(rows, new)`):
            The tokens behind those in the cache, right-padded.
        num_tokens (`torch.LongTensor` of shape `(rows,)`, on the CPU):
            How many of them count in each row.
    """
    write = cache.begin(rows, num_tokens, token_ids.shape[1], token_ids.device)
    is_eager = model.config.get_text_config(decoder=True)._attn_implementation == "eager"
    is_additive = is_eager or token_ids.shape[1] <= MAX_POSITIONS  # larger ones would take four times the memory
    outputs = model(
        input_ids=token_ids,
        attention_mask=cache.attention_mask(is_additive, model.dtype),
        position_ids=write.position_ids,
        cache=cache,
        use_cache=True,  # Trainer turns it off in the config
        return_dict=True,
        **model_kwargs,
    )
    cache.advance(rows, num_tokens)
    return outputs


def forward_last(
    model: PreTrainedModel, cache: SlotCache, rows: slice, token_ids: Tensor, num_tokens: Tensor, **model_kwargs: Any
) -> ModelOutput:
    """As `forward`, with `logits` of shape `(rows, 1, vocab)`: those of each row's last token that counts."""
    last = (num_tokens - 1).clamp(min=0)
    positions, index = last.unique(return_inverse=True)
    if model._supports_logits_to_keep():
        model_kwargs["logits_to_keep"] = positions.to(token_ids.device)
    else:
        index = last
    outputs = forward(model, cache, rows, token_ids, num_tokens, **model_kwargs)
    row_index = torch.arange(len(index), device=outputs.logits.device)
    outputs.logits = outputs.logits[row_index, index.to(outputs.logits.device)][:, None]
    return outputs


class Rows:
    """
    Slots for requests that are decoded side by side, with the target's cache and the drafter's.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The target.
        num_rows (`int`):
            The number of slots.
        capacity (`int`, *optional*):
            A fixed number of cache columns, see [`SlotCache`].
        draft_cache ([`SlotCache`], *optional*):
            The drafter's cache, which `commit` and `leave` treat like the target's.

    Attributes:
        requests (`list[Request | None]`): the request of each slot whose prompt is in the cache.
        device (`torch.device`): where the target takes its inputs.
        span (`slice`): the consecutive slots that take part in the current round. All row tensors of a round (what a
            drafter gets and returns, scores, verification) have one row per slot of the span, empty slots included.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_rows: int,
        capacity: int | None = None,
        draft_cache: SlotCache | None = None,
    ):
        self.model = model
        self.cache = SlotCache(model.config, num_rows, capacity)
        self._draft_cache = draft_cache
        self.requests: list[Request | None] = [None] * num_rows
        self.span = slice(0, num_rows)
        self.device = execution_device(model)

    @property
    def draft_cache(self) -> SlotCache:
        """The cache that the drafter has made."""
        assert self._draft_cache is not None, "the drafter has no cache"
        return self._draft_cache

    @property
    def num_spanned(self) -> int:
        """How many slots the span has."""
        return self.span.stop - self.span.start

    @property
    def spanned(self) -> list[Request | None]:
        """The requests of the span's slots."""
        return self.requests[self.span]

    @property
    def noises(self) -> list[Noise | None]:
        """The random numbers of the span's slots, None where nothing is sampled."""
        return [None if request is None else request.noise for request in self.spanned]

    def live(self) -> list[tuple[int, Request]]:
        """The requests of the span with their row in the round's tensors."""
        return [(row, request) for row, request in enumerate(self.spanned) if request is not None]

    def leave(self, slot: int) -> None:
        """Frees a slot: its cached columns no longer count."""
        self.requests[slot] = None
        for cache in self.caches():
            cache.truncate(slot, 0)

    def commit(self, slot: int, token_ids: list[int]) -> None:
        """Gives a row its new tokens and rolls its caches back to what is committed."""
        self._at(slot).commit(token_ids)
        self._truncate(slot)

    def roll_back(self, slot: int) -> None:
        """Brings a row back to what is committed, after a round that failed."""
        self._at(slot).roll_back()
        self._truncate(slot)

    def _at(self, slot: int) -> Request:
        request = self.requests[slot]
        assert request is not None, "an empty slot has nothing to commit"
        return request

    def _truncate(self, slot: int) -> None:
        for cache in self.caches():
            cache.truncate(slot, self._at(slot).num_committed - 1)

    def caches(self) -> list[SlotCache]:
        """The target's cache, and the drafter's if it has one."""
        return [self.cache] if self._draft_cache is None else [self.cache, self._draft_cache]

    def pending(self, cache: SlotCache, rows: slice | None = None) -> list[list[int]]:
        """The committed tokens of each row of the span (or of `rows`) that `cache` does not hold yet."""
        rows = self.span if rows is None else rows
        starts = cache.lengths[rows].tolist()
        return [
            [] if request is None else request.committed_from(start)
            for request, start in zip(self.requests[rows], starts)
        ]


def padded(token_lists: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded ids of shape `(rows, longest)` on `device`, and the lengths on the CPU."""
    lengths = [len(tokens) for tokens in token_lists]
    longest = max(lengths)
    token_ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in token_lists], dtype=torch.long)
    return token_ids.to(device, non_blocking=True), torch.tensor(lengths)
