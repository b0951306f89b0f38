"""Speculative sampling: which candidates a row keeps, and the token that follows them.

Tensors only: knows no model, cache or tokenizer, draws no noise and never waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """
    Tokens that a drafter proposes, one block per row.

    Args:
        token_ids (`torch.LongTensor` of shape `(rows, k)`):
            The proposed tokens, right-padded with any valid id.
        lengths (`torch.LongTensor` of shape `(rows,)`, on the CPU):
            How many of them count in each row, between 0 and `k`.
        probs (`torch.FloatTensor` of shape `(rows, k, vocab)`, *optional*):
            The very distributions that the tokens were sampled from, in fp32. `None` says that they were chosen
            without chance (greedy drafting, prompt lookup): their distribution is one-hot.

    Raises:
        `ValueError`: if the shapes or types do not fit together.
    """

    token_ids: Tensor
    lengths: Tensor
    probs: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.token_ids.shape)
        if len(shape) != 2 or self.token_ids.dtype != torch.long:
            raise ValueError(f"`token_ids` has to be a LongTensor of shape (rows, k), but is {self.token_ids!r}.")
        if tuple(self.lengths.shape) != shape[:1] or self.lengths.dtype != torch.long:
            raise ValueError(f"`lengths` has to be a LongTensor of shape ({shape[0]},), but is {self.lengths!r}.")
        if self.probs is not None and tuple(self.probs.shape[:2]) != shape:
            raise ValueError(f"`probs` has to be of shape {shape} and vocab, but is of {tuple(self.probs.shape)}.")

    @classmethod
    def none(cls, rows: int, device: torch.device) -> "Candidates":
        """No candidates for `rows` rows: the round becomes a plain decoding step."""
        return cls(torch.zeros(rows, 0, dtype=torch.long, device=device), torch.zeros(rows, dtype=torch.long))


@dataclass(frozen=True)
class Verification:
    """
    What became of the candidates of a round.

    Args:
        num_accepted (`torch.LongTensor` of shape `(rows,)`):
            How many candidates each row keeps.
        next_token_ids (`torch.LongTensor` of shape `(rows,)`):
            The token after the kept ones: the correction of the first refused candidate, or the bonus token.
        num_possible (`torch.LongTensor` of shape `(rows,)`):
            How many positions come before the first one at which no token of finite score is left.
    """

    num_accepted: Tensor
    next_token_ids: Tensor
    num_possible: Tensor


def verify(
    candidates: Candidates, scores: Tensor, do_sample: Sequence[bool], noise: Tensor | None = None
) -> Verification:
    """
    Judges a block of candidates per row (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192, algorithm 1).

    Greedy rows keep the candidates that equal the target's best token. Sampling rows keep candidate `x` when
    `u * q(x) < p(x)` and draw the token after a refusal from `max(p - q, 0)`, so that what a row emits has exactly
    the distribution `p = softmax(scores)`.

    Args:
        candidates ([`Candidates`]):
            The proposed tokens of every row.
        scores (`torch.FloatTensor` of shape `(rows, k + 1, vocab)`):
            The target's processed scores in fp32; position `i` is judged after the first `i` candidates.
        do_sample (`Sequence[bool]` of length `rows`):
            Which rows sample; the others are greedy.
        noise (`torch.FloatTensor` of shape `(rows, k + 1)`, *optional*):
            Uniform numbers in `[0, 1)`, needed when a row samples: column `i < k` decides about candidate `i`, the
            last one picks the next token by inversion of its distribution.

    Raises:
        `ValueError`: if a row samples and there is no noise.
    """
    rows, k = candidates.token_ids.shape
    device = scores.device
    if k == 0 and not any(do_sample):  # a plain greedy step
        best_scores, best_ids = scores[:, 0].max(dim=-1)
        return Verification(torch.zeros_like(best_ids), best_ids, (best_scores > -torch.inf).long())
    lengths = candidates.lengths.to(device, non_blocking=True)
    if noise is None:
        if any(do_sample):
            raise ValueError("`noise` is None, but some rows sample; give uniform numbers of shape (rows, k + 1).")
        noise = scores.new_zeros(rows, k + 1)
    is_drafted = torch.arange(k, device=device) < lengths[:, None]
    best_scores, best_ids = scores.max(dim=-1)
    is_accepted = candidates.token_ids == best_ids[:, :k]
    if any(do_sample):
        is_sampling = torch.tensor(do_sample).to(device, non_blocking=True)
        probs = scores.softmax(dim=-1)
        # Greedy search may take a score of +inf, but no distribution can be made of it.
        best_scores = best_scores.masked_fill(is_sampling[:, None] & (best_scores == torch.inf), -torch.inf)
        is_accepted = torch.where(is_sampling[:, None], _accept(candidates, probs, noise), is_accepted)
    num_accepted = (is_accepted & is_drafted).long().cumprod(dim=-1).sum(dim=-1)
    next_ids = best_ids.gather(1, num_accepted[:, None])[:, 0]
    if any(do_sample):
        is_refused = num_accepted < lengths
        sampled_ids = sample(_next_weights(candidates, probs, num_accepted, is_refused), noise[:, -1])
        next_ids = torch.where(is_sampling, sampled_ids, next_ids)
    num_possible = (best_scores > -torch.inf).long().cumprod(dim=-1).sum(dim=-1)
    return Verification(num_accepted, next_ids, num_possible)


def _accept(candidates: Candidates, probs: Tensor, noise: Tensor) -> Tensor:
    """`u * q(x) < p(x)`, strict and without a division: a token of probability 0 is never kept. (rows, k)"""
    index = candidates.token_ids[..., None]
    p = probs[:, : index.shape[1]].gather(-1, index)[..., 0]
    q = 1.0 if candidates.probs is None else candidates.probs.gather(-1, index)[..., 0]
    return noise[:, : index.shape[1]] * q < p


def _next_weights(candidates: Candidates, probs: Tensor, num_accepted: Tensor, is_refused: Tensor) -> Tensor:
    """Weights, not normalised, of the token after the kept candidates. (rows, vocab)"""
    rows, k = candidates.token_ids.shape
    row_index = torch.arange(rows, device=probs.device)
    p = probs[row_index, num_accepted]
    if k == 0:
        return p
    refused_index = num_accepted.clamp(max=k - 1)
    if candidates.probs is None:
        residual = p.scatter(1, candidates.token_ids[row_index, refused_index][:, None], 0.0)
    else:
        residual = (p - candidates.probs[row_index, refused_index]).clamp(min=0)
    is_usable = is_refused & (residual.sum(dim=-1) > 0)
    return torch.where(is_usable[:, None], residual, p)


def sample(weights: Tensor, uniforms: Tensor) -> Tensor:
    """
    Draws one index per row by inversion of the cumulative distribution.

    Args:
        weights (`torch.FloatTensor` of shape `(rows, vocab)`):
            Non-negative weights; they need not sum to one. An index of weight 0 is never drawn.
        uniforms (`torch.FloatTensor` of shape `(rows,)`):
            Numbers in `[0, 1)`.

    Returns:
        `torch.LongTensor` of shape `(rows,)`.
    """
    cumulative = weights.double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Below the total even after rounding, so that the search always ends on an index of positive weight.
    threshold = torch.minimum(uniforms.double()[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)
