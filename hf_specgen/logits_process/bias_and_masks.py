"""OpenAI's logit bias, and the mask of ids that no tokenizer can decode.

For any `model.generate`. Tensors only: knows no model, tokenizer or loop.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from numbers import Real

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ..arguments import checked_integer, checked_number, shown
from .token_penalties import represent

MAX_DIGITS = 20  # of an id of 64 bits, with a sign
MAX_TOKEN_ID = torch.iinfo(torch.long).max


class LogitBias(LogitsProcessor):
    r"""
    OpenAI's `logit_bias`: numbers added to the scores of given ids, -inf to forbid one.

    Args:
        bias (`Mapping[int | str, float]`):
            Token id, as an integer or a string such as `"198"` (JSON knows no other keys), to what is added. Ids
            outside the vocabulary of the scores are ignored.

    Raises:
        `ValueError`: for a key that is no integer, an id given twice, or a value that is NaN or +inf.
        `TypeError`: for keys and values of other types.
    """

    def __init__(self, bias: Mapping[int | str, float]):
        if not isinstance(bias, Mapping):
            raise TypeError(f"`bias` has to be a mapping of token ids to numbers, but is {shown(bias)}.")
        self.bias: dict[int, float] = {}
        for key, value in bias.items():
            token = _checked_key(key)
            if token in self.bias:
                raise ValueError(f"`bias` has to name an id once, but names {token} both as a number and as a string.")
            is_ban = isinstance(value, Real) and value == -float("inf")
            self.bias[token] = -float("inf") if is_ban else checked_number(f"bias[{shown(key)}]", value)
        self._ids = sorted(token for token in self.bias if 0 <= token <= MAX_TOKEN_ID)
        values = [self.bias[token] for token in self._ids]
        self._on_device = torch.tensor(self._ids, dtype=torch.long), torch.tensor(values, dtype=torch.float32)

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """Returns biased `scores`, of shape `(..., vocab)`, as a new tensor; `input_ids` do not matter."""
        if self._on_device[0].device != scores.device:
            self._on_device = self._on_device[0].to(scores.device), self._on_device[1].to(scores.device)
        num_ids = bisect_left(self._ids, scores.shape[-1])
        ids, bias = (tensor[:num_ids] for tensor in self._on_device)
        biased = (scores[..., ids] + bias).clamp(max=torch.finfo(scores.dtype).max)
        scores = scores.clone()
        scores[..., ids] = biased.to(scores.dtype)
        return scores

    def __repr__(self) -> str:
        return represent(self)


class UndecodableMask(LogitsProcessor):
    """
    Forbids the ids that a head can produce but the tokenizer cannot decode: those of a padded vocabulary, and padding.

    Args:
        tokenizer_size (`int`):
            `len(tokenizer)`: ids from here on are forbidden.
        pad_token_id (`int`, *optional*):
            Forbidden too, unless it also ends a row.
        eos_token_id (`int | list[int]`, *optional*):
            What ends a row.

    Raises:
        `ValueError`: for a size below 1. `TypeError`: for anything that is no integer.
    """

    def __init__(
        self, tokenizer_size: int, pad_token_id: int | None = None, eos_token_id: int | list[int] | None = None
    ):
        self.tokenizer_size = checked_integer("tokenizer_size", tokenizer_size)
        if self.tokenizer_size < 1:
            raise ValueError(f"`tokenizer_size` has to be at least 1, but is {tokenizer_size!r}.")
        self.pad_token_id = None if pad_token_id is None else checked_integer("pad_token_id", pad_token_id)
        if eos_token_id is None:
            eos_token_id = []
        elif not isinstance(eos_token_id, Iterable):
            eos_token_id = [eos_token_id]
        self.eos_token_id = [checked_integer("eos_token_id", token) for token in eos_token_id]

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        """Returns masked `scores`, of shape `(..., vocab)`, as a new tensor; `input_ids` do not matter."""
        pad, vocab_size = self.pad_token_id, scores.shape[-1]
        scores = scores.clone()
        scores[..., self.tokenizer_size :] = -float("inf")
        if pad is not None and 0 <= pad < vocab_size and pad not in self.eos_token_id:
            scores[..., pad] = -float("inf")
        return scores

    def __repr__(self) -> str:
        return represent(self)


def _checked_key(key: int | str) -> int:
    if isinstance(key, str):
        if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) <= MAX_DIGITS):
            raise ValueError(f'`bias` has to have token ids as keys, such as 198 or "198", but has {shown(key)}.')
        return int(key)
    return checked_integer("bias", key)
