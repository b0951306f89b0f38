"""Policies that decide how many of its candidates each row verifies: all, the confident ones, or by throughput.

Knows probabilities and costs, but no model, drafter or cache.
"""

from heapq import heappop, heappush

import torch
from torch import Tensor

from ..arguments import checked_probability
from ..engine.width import DraftLengthPolicy
from .step_costs import StepCosts


class VerifyAll(DraftLengthPolicy):
    """Every candidate is verified."""

    needs_confidence = False

    def __repr__(self) -> str:
        return "VerifyAll()"

    def lengths(self, confidences: Tensor | None, limits: Tensor, is_live: Tensor) -> Tensor:
        return limits.clone()


class ConfidenceThreshold(DraftLengthPolicy):
    """
    A row verifies the candidates before the first one whose confidence is below a threshold. Each is judged by its
    own confidence, not by the product of those up to it.

    Args:
        threshold (`float`):
            The least confidence, from 0, where everything is verified, to 1. A confidence of NaN is below all.

    Raises:
        `TypeError`, `ValueError`: if `threshold` is no number in [0, 1].
    """

    needs_confidence = True

    def __init__(self, threshold: float):
        self.threshold = checked_probability("threshold", threshold)

    def __repr__(self) -> str:
        return f"ConfidenceThreshold({self.threshold})"

    def lengths(self, confidences: Tensor | None, limits: Tensor, is_live: Tensor) -> Tensor:
        assert confidences is not None, "a threshold needs confidences"
        is_confident = confidences >= self.threshold  # False for NaN
        num_confident = is_confident.long().cumprod(dim=1).sum(dim=1)  # (rows,) before the first False
        return torch.minimum(num_confident.cpu(), limits)


class ThroughputScheduler(DraftLengthPolicy):
    """
    The rows share the tokens of the pass so that the batch is expected to gain the most tokens per second: algorithm 1
    of DSpark (DeepSeek, 2026, https://arxiv.org/abs/2607.05147).

    Let `a[r, j]` be the product of row r's confidences up to candidate j. A pass that verifies `l[r]` candidates of
    each live row has `n = sum of 1 + l[r]` tokens and is expected to yield `tau`, the sum of `1 + a[r, 1] + ... +
    a[r, l[r]]`. Candidates are taken in the order of falling `a` while `tau / cost(n)` grows; the first one that does
    not raise it ends the search. A candidate that cannot be accepted is never taken.

    The early stop is what keeps the text exact. A search over all lengths would be biased: it might verify candidate
    j because candidate j + 1, whose confidence is computed from token j, looks good, and so keep tokens with good
    successors more often than their probability. Here a confidence is looked at only when all candidates before it in
    its row have been taken. The price is that a gain behind a dip is missed: a jump in the costs may end the search.

    Args:
        step_costs ([`StepCosts`]):
            What passes cost. Our target pass is padded to its longest row, and rows of different lengths cost more
            than their tokens say. `profile_step_costs` measures this pass, with the number of rows that it is given,
            so measure with it, and with as many rows as will be decoded side by side.

    Raises:
        `TypeError`: if `step_costs` is something else.
    """

    needs_confidence = True

    def __init__(self, step_costs: StepCosts):
        if not isinstance(step_costs, StepCosts):
            raise TypeError(f"`step_costs` has to be a `StepCosts`, but is a {type(step_costs).__name__!r}.")
        self.step_costs = step_costs

    def __repr__(self) -> str:
        return f"ThroughputScheduler({self.step_costs!r})"

    def lengths(self, confidences: Tensor | None, limits: Tensor, is_live: Tensor) -> Tensor:
        assert confidences is not None, "the scheduler needs confidences"
        table, room = confidences.tolist(), limits.tolist()
        rows = [row for row, live in enumerate(is_live.tolist()) if live]
        lengths = [0] * len(room)
        # Each row's next candidate: the most probable first, of equal ones the earliest position, then the first row.
        nexts: list[tuple[float, int, int]] = []

        def enqueue(row: int, position: int, survival: float) -> None:
            if position < room[row] and survival * table[row][position] > 0:  # False for NaN
                heappush(nexts, (-survival * table[row][position], position, row))

        for row in rows:
            enqueue(row, 0, 1.0)
        num_tokens, expected = len(rows), float(len(rows))
        best = expected / self.step_costs.at(num_tokens)
        while nexts:
            negated, position, row = heappop(nexts)
            num_tokens, expected = num_tokens + 1, expected - negated
            throughput = expected / self.step_costs.at(num_tokens)
            if not throughput > best:
                break
            best, lengths[row] = throughput, position + 1
            enqueue(row, position + 1, -negated)
        return torch.tensor(lengths, dtype=torch.long)
