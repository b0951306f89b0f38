"""The random numbers of requests: each has its own, so that a seed gives one text whatever else is in the batch.

Knows no tokens and no distributions. Another kind of noise would have its place here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_SEED = 2**32 - 1  # of torch's CPU generator


class Noise:
    """
    Uniform numbers of one request, in the order of use. Those drawn since the last `commit` can be taken back.

    Args:
        seed (`int`, *optional*):
            Where the numbers start; by default drawn from torch's default generator.
    """

    def __init__(self, seed: int | None = None):
        self._seed = int(torch.randint(MAX_SEED, ())) if seed is None else seed
        self._generator = torch.Generator().manual_seed(self._seed)
        self._num_drawn = self._num_committed = 0

    def draw(self, count: int) -> Tensor:
        """The next `count` numbers in `[0, 1)`, on the CPU."""
        self._num_drawn += count
        return torch.rand(count, generator=self._generator)

    def commit(self) -> None:
        """The round is over: its numbers are used up."""
        self._num_committed = self._num_drawn

    def roll_back(self) -> None:
        """The round has failed: its numbers come again."""
        self._generator.manual_seed(self._seed)
        self._num_drawn = 0
        self.draw(self._num_committed)


def draft_noise(noises: Sequence[Noise | None], counts: Sequence[int], columns: int) -> Tensor:
    """
    Numbers for drafting, of shape `(rows, columns)`: the first `counts[row]` of a row are its own, the rest is 0.

    Args:
        noises (`Sequence[Noise | None]`):
            Those of each row, None where nothing is sampled.
        counts (`Sequence[int]`), columns (`int`):
            How many numbers each row needs, and the width of the table.
    """
    table = torch.zeros(len(noises), columns)
    for row, (noise, count) in enumerate(zip(noises, counts)):
        if noise is not None:
            table[row, :count] = noise.draw(count)
    return table


def verification_noise(noises: Sequence[Noise | None], lengths: Tensor, k: int) -> Tensor:
    """
    Numbers for a verification, of shape `(rows, k + 1)`: a row draws one per candidate and one for the next token, in
    the last column, whatever the others draw.
    """
    drawn = draft_noise(noises, (lengths + 1).tolist(), k + 1)
    table = drawn.clone()
    table[:, k] = drawn.gather(1, lengths[:, None])[:, 0]
    return table
