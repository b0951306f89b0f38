"""What a round means for its rows: which of the decided tokens each takes, and why it ends.

A position that could not be judged matters only if decoding reaches it: not behind a refused candidate, an eos or a
stop.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import Failure, Rows
from .request import Request, token_logprobs
from .scoring import name_masking_processor
from .stats import RoundTrace
from .stopping import cut


@dataclass(frozen=True)
class Outcome:
    """What verification decided for one row, on the host."""

    row: int  # of the span
    request: Request
    proposed: list[int]
    num_accepted: int
    next_token_id: int
    num_possible: int  # positions before the first one without a token of finite score

    @property
    def decided(self) -> list[int]:
        """The kept candidates and the token after them."""
        return [*self.proposed[: self.num_accepted], self.next_token_id]

    def keep_scores(self, scores: Tensor, logits: Tensor) -> None:
        """Copies those of the decided tokens to the request if it asks for them; shapes (rows, k + 1, vocab)."""
        count = len(self.decided)
        if self.request.keep_scores:
            self.request.scores.extend(scores[self.row, :count].clone().unbind())
        if self.request.keep_logits:
            self.request.logits.extend(logits[self.row, :count].to(torch.float32, copy=True).unbind())
        if self.request.num_logprobs is not None:
            self.request.logprobs.extend(
                token_logprobs(logits[self.row, :count], self.decided, self.request.num_logprobs)
            )

    def trace(self, num_taken: int) -> RoundTrace:
        """The round as the row took it."""
        return RoundTrace(
            row=self.request.number,
            proposed=tuple(self.proposed),
            num_accepted=min(self.num_accepted, num_taken),
            next_token_id=self.next_token_id if num_taken > self.num_accepted else None,
        )


@dataclass(frozen=True)
class Taken:
    """How many of its decided tokens a row takes, and the finish reason, None if it goes on."""

    num_tokens: int
    finish_reason: str | None


def settle(rows: Rows, outcomes: list[Outcome], candidate_ids: Tensor, logits: Tensor) -> list[Taken]:
    """
    Cuts the decided tokens at the first stop or failure of each row.

    Args:
        rows ([`Rows`]):
            The rows as they were when the tokens were decided, with the failures of scoring.
        outcomes (`list[Outcome]`):
            One per live row.
        candidate_ids (`torch.LongTensor` of shape `(rows, k)`), logits (`torch.Tensor` of shape
            `(rows, k + 1, vocab)`): what was verified.

    Raises:
        What a processor or criterion raised, if its request shares the processors with others. A request that stands
        alone keeps the error and ends.
    """
    failures = [_reached_failure(rows, outcome, candidate_ids, logits) for outcome in outcomes]
    tokens = [o.decided if f is None else o.decided[: f.position] for o, f in zip(outcomes, failures)]
    with_tokens = [index for index, ids in enumerate(tokens) if ids]
    cuts = cut([outcomes[index].request for index in with_tokens], [tokens[index] for index in with_tokens])
    taken = [Taken(0, None)] * len(outcomes)
    for index, (num_tokens, finish_reason) in zip(with_tokens, cuts):
        taken[index] = Taken(num_tokens, finish_reason)
    for index, (outcome, failure) in enumerate(zip(outcomes, failures)):
        request = outcome.request
        if request.error is None and failure is not None and taken[index].finish_reason is None:
            if not request.is_alone:
                raise failure.error
            request.error = failure.error
            taken[index] = Taken(failure.position, "error")
        elif request.error is not None:  # raised by one of its own stopping criteria
            taken[index] = Taken(0, "error")
    return taken


def _reached_failure(rows: Rows, outcome: Outcome, candidate_ids: Tensor, logits: Tensor) -> Failure | None:
    """The first position that could not be judged although all candidates before it are kept."""
    failure = rows.failures.get(outcome.row)
    if failure is not None and failure.position <= min(outcome.num_accepted, outcome.num_possible):
        return failure
    if outcome.num_possible > outcome.num_accepted:
        return None
    culprit = name_masking_processor(rows, logits, candidate_ids, outcome.row, outcome.num_possible)
    num_tokens = outcome.request.num_committed + outcome.num_possible
    message = (
        f"No token is left to choose after {num_tokens} tokens of row {outcome.request.batch_row}: {culprit} masked "
        "all that remained, or the scores are not numbers."
    )
    return Failure(outcome.num_possible, ValueError(message))
