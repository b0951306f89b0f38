"""TokenCounts: how often each token occurs in each row, kept sparsely while rows grow.

Knows which occurrences count, and nothing of scores, penalties or drafting.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import dropwhile

import torch
from torch import Tensor

WIDTH_STEP = 64


class TokenCounts:
    """
    The distinct counted ids of each row and their counts, as tensors that can be gathered and scattered with.

    Slot 0 of a row stands for id 0, occurring or not, and the slots that a row does not use repeat it: whoever writes
    a value that depends on nothing but (id, count) may write all slots.

    Args:
        prompt_ids (`torch.LongTensor` of shape `(rows, columns)`):
            The prompts with their left padding; its device is where the tensors live.
        count_prompt (`bool`, *optional*, defaults to `True`):
            Whether the prompt's tokens count.
        pad_token_id (`int`, *optional*):
            The leading run of this id in a row is never counted. `None` counts every id.
        exempt_ids (`Collection[int]`, *optional*, defaults to `()`):
            Ids that are never counted.

    Attributes:
        ids (`torch.LongTensor` of shape `(rows, width)`):
            The ids of the slots, none negative. They may lie outside a vocabulary, see `select`.
        counts (`torch.FloatTensor` of shape `(rows, width)`):
            Their numbers of occurrences.
    """

    def __init__(
        self,
        prompt_ids: Tensor,
        *,
        count_prompt: bool = True,
        pad_token_id: int | None = None,
        exempt_ids: Collection[int] = (),
    ):
        num_rows, device = len(prompt_ids), prompt_ids.device
        self.ids = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        self.counts = torch.zeros(num_rows, 1, dtype=torch.float32, device=device)
        self._pad_token_id = pad_token_id
        self._exempt_ids = frozenset(exempt_ids)
        self._exempt = torch.tensor(sorted(self._exempt_ids), dtype=torch.long, device=device)
        self._slots: list[dict[int, int]] = [{0: 0} for _ in range(num_rows)]  # per row: id -> slot
        self._has_begun = [False] * num_rows  # per row: whether its leading run of padding has ended
        for row, token_ids in enumerate(prompt_ids.tolist()):
            token_ids = self._without_padding(row, token_ids)
            if count_prompt:
                self._count(row, token_ids)

    def add(self, row: int, token_ids: Sequence[int]) -> None:
        """Counts committed tokens of a row, in their order."""
        self._count(row, self._without_padding(row, token_ids))

    def select(self, rows: Sequence[int], vocab_size: int) -> tuple[Tensor, Tensor]:
        """
        The ids and counts of `rows`, both of shape `(len(rows), width)`, for scores over `vocab_size` tokens: slots
        of other ids repeat slot 0.
        """
        # Stacked, not indexed with a list: a list would be copied to the device, and that waits for it.
        ids = torch.stack([self.ids[row] for row in rows])
        counts = torch.stack([self.counts[row] for row in rows])
        is_outside = ids >= vocab_size
        return ids.masked_fill_(is_outside, 0), torch.where(is_outside, counts[:, :1], counts)

    def is_counted(self, rows: Sequence[int], token_ids: Tensor, vocab_size: int) -> Tensor:
        """Which of `token_ids`, of shape `(len(rows), k)`, would count if they followed what `rows` hold."""
        is_counted = is_in_vocabulary(token_ids, vocab_size)
        if self._exempt_ids:
            is_counted &= ~torch.isin(token_ids, self._exempt)
        if self._pad_token_id is not None:
            for index, row in enumerate(rows):
                if not self._has_begun[row]:
                    is_counted[index] &= has_begun(token_ids[index], self._pad_token_id)
        return is_counted

    def _without_padding(self, row: int, token_ids: Sequence[int]) -> Sequence[int]:
        if not self._has_begun[row] and self._pad_token_id is not None:
            token_ids = list(dropwhile(self._pad_token_id.__eq__, token_ids))
        self._has_begun[row] = self._has_begun[row] or len(token_ids) > 0
        return token_ids

    def _count(self, row: int, token_ids: Sequence[int]) -> None:
        new = Counter(token for token in token_ids if token >= 0 and token not in self._exempt_ids)
        if not new:
            return
        slots = self._slots[row]
        num_used = len(slots)
        for token in new:
            slots.setdefault(token, len(slots))
        self._widen(len(slots))
        self.counts[row, num_used : len(slots)] = 0  # these slots repeated slot 0 so far
        update = torch.tensor([[slots[token] for token in new], list(new), list(new.values())], device=self.ids.device)
        self.ids[row, update[0]] = update[1]
        self.counts[row, update[0]] += update[2]
        if 0 in new:
            self.counts[row, len(slots) :] = self.counts[row, 0]

    def _widen(self, width: int) -> None:
        missing = width - self.ids.shape[1]
        if missing > 0:
            missing += -width % WIDTH_STEP
            self.ids = torch.cat([self.ids, self.ids[:, :1].expand(-1, missing)], dim=1)
            self.counts = torch.cat([self.counts, self.counts[:, :1].expand(-1, missing)], dim=1)


def is_in_vocabulary(token_ids: Tensor, vocab_size: int) -> Tensor:
    """Which of `token_ids` lie in `[0, vocab_size)`: a boolean tensor of the same shape."""
    return (token_ids >= 0) & (token_ids < vocab_size)


def has_begun(token_ids: Tensor, pad_token_id: int) -> Tensor:
    """False in the leading run of `pad_token_id` of each row of `token_ids`, a tensor of shape `(..., length)`."""
    return (token_ids != pad_token_id).cumsum(-1) > 0


def counts_in_block(token_ids: Tensor, is_counted: Tensor, first: int) -> Tensor:
    """
    How often each token of a block occurs in the block's first `first`, `first + 1`, ... `k` tokens.

    Args:
        token_ids (`torch.LongTensor` of shape `(rows, k)`): The block.
        is_counted (`torch.BoolTensor` of shape `(rows, k)`): Which of its tokens count.
        first (`int`): How many tokens to start with.

    Returns:
        `torch.FloatTensor` of shape `(rows, k + 1 - first, k)`.
    """
    is_same = (token_ids[:, :, None] == token_ids[:, None]) & is_counted[:, None]  # (rows, k, k that count)
    occurrences = torch.nn.functional.pad(is_same.cumsum(-1, dtype=torch.float32), (1, 0))  # none in the first 0
    return occurrences[..., first:].transpose(1, 2)
