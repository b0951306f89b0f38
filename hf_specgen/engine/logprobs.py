"""How likely the tokens of a text were under the model's own scores."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
