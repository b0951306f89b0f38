"""RowResult: what a row takes from a round, and why it ends there."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import Rows
from .request import FinishReason, Request
from .scoring import Scores, name_masking_processor
from .stats import RoundTrace
from .verification import Candidates, Verification


@dataclass(frozen=True)
class RowResult:
    """
    What a row takes from a round, and why it ends there.

    Args:
        row (`int`): the row of the round's tensors.
        request ([`Request`]): the row's request.
        start (`int`): how many tokens the request had before.
        proposed (`list[int]`): the candidates that were verified.
        num_accepted (`int`): how many of them verification kept.
        token_ids (`list[int]`): the tokens that the row takes.
        finish_reason (`str`, *optional*): why it ends with them, None if it goes on.
        error (`Exception`, *optional*): what ended it, with finish reason `"error"`.
    """

    row: int
    request: Request
    start: int
    proposed: list[int]
    num_accepted: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: Exception | None = None

    def trace(self, num_taken: int) -> RoundTrace:
        """The round of a row that took `num_taken` tokens."""
        return RoundTrace(
            row=self.request.number,
            proposed=tuple(self.proposed),
            num_accepted=min(self.num_accepted, num_taken),
            next_token_id=self.token_ids[self.num_accepted] if num_taken > self.num_accepted else None,
        )


def round_results(
    rows: Rows, candidates: Candidates, verification: Verification, scores: Scores, logits: Tensor
) -> list[RowResult]:
    """
    What verification decided, on the host, for each live row: the kept candidates and the token after them, up to the
    first position that could not be judged. Such a position ends the row only if verification has come there.
    """
    decided = [verification.next_token_ids, verification.num_accepted, verification.num_possible]
    columns = [candidates.token_ids, *(column[:, None] for column in decided)]
    table = torch.cat(columns, dim=1).tolist()  # the round's one wait for the device
    results = []
    for row, request in rows.live():
        *proposed, next_token_id, num_accepted, num_possible = table[row]
        proposed = proposed[: int(candidates.lengths[row])]
        token_ids = [*proposed[:num_accepted], next_token_id]
        error = None
        if num_possible <= num_accepted:
            token_ids = token_ids[:num_possible]
            failure = scores.failures.get(row)
            if failure is not None and failure.position == num_possible:
                error = failure.error
            else:
                error = _nothing_left(rows, row, candidates.token_ids, logits, num_possible)
        reason: FinishReason | None = None if error is None else "error"
        start = len(request.token_ids)
        results.append(RowResult(row, request, start, proposed, num_accepted, token_ids, reason, error))
    return results


def _nothing_left(rows: Rows, row: int, candidate_ids: Tensor, logits: Tensor, position: int) -> ValueError:
    request = rows.spanned[row]
    assert request is not None, "a live row has a request"
    culprit = name_masking_processor(rows, logits, candidate_ids, row, position)
    return ValueError(
        f"No token is left to choose after {request.num_committed + position} tokens of row {request.batch_row}: "
        f"{culprit} masked all that remained, or the scores are not numbers."
    )
