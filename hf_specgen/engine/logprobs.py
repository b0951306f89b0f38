"""How likely the tokens of a text were, under the model's own scores or under the processed ones."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

LogprobsMode = Literal["raw", "processed"]
LOGPROBS_MODES = get_args(LogprobsMode)


@dataclass(frozen=True)
class TokenLogprobs:
    """
    How likely a token was: under the model's own scores, or under those after all processors and warpers, from which
    tokens are drawn.

    Args:
        token_id (`int`), logprob (`float`): the token and the logarithm of its probability.
        top (`tuple[tuple[int, float], ...]`): the same of the likeliest tokens, the best first; fewer than asked for
            where fewer are possible at all.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(scores: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """What scores of shape `(positions, vocab)` say of the tokens chosen there, and of the `num_top` likeliest."""
    logprobs = scores.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=scores.device)[:, None])[:, 0].tolist()
    values, ids = (part.tolist() for part in logprobs.topk(num_top, dim=-1))
    tops = [tuple((i, value) for i, value in zip(*top) if value > -torch.inf) for top in zip(ids, values)]
    return [TokenLogprobs(*entry) for entry in zip(token_ids, chosen, tops)]
