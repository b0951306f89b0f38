"""Stopping criteria of which nothing is known: they may remember what they saw, and one row's end may hang on others.

So they are asked as plain `generate` asks them: on the whole padded batch, once per number of generated tokens, in
growing order, with committed tokens alone. A number's turn comes when no row that is being decoded has fewer tokens.
Rows that are ahead of it may have to give tokens back; they have cost no time, as the slowest row sets the pace.
"""

import torch
from transformers import StoppingCriteria

from .request import PaddedBatch, Request
from .stopping import precedes


def is_settled(request: Request, num_tokens: int) -> bool:
    """Whether nothing can take a request's first `num_tokens` tokens back any more."""
    return not request.rules.unknown_criteria or num_tokens <= request.batch.num_judged


def apply_criteria(batch: PaddedBatch) -> None:
    """
    Asks the criteria about all tokens whose turn has come, and ends the requests for which they say so.

    Raises:
        What a criterion raised, or a processor before it, if requests share them. A request that stands alone keeps
        the error, and the tokens before the one that the criterion failed to judge.
    """
    criteria = next(request.rules.unknown_criteria for request in batch.requests if request is not None)
    _raise_failures(batch, batch.num_judged if criteria else None)
    while criteria and batch.num_judged < _num_ready(batch):
        length = batch.num_judged + 1
        try:
            is_done = _ask(criteria, batch, length)
        except Exception as error:
            request = batch.requests[0]
            if request is None or not request.is_alone:
                raise
            request.finish("error", length - 1, error)
            return
        for request, is_row_done in zip(batch.requests, is_done):
            if request is not None and len(request.token_ids) >= length and is_row_done:
                is_cut = len(request.token_ids) > length
                if is_cut or request.finish_reason is None or precedes("criteria", request.finish_reason):
                    request.finish("criteria", length)
        batch.num_judged = length
        _raise_failures(batch, length)


def _num_ready(batch: PaddedBatch) -> int:
    """The largest number of generated tokens that can be judged."""
    requests = [request for request in batch.requests if request is not None and request.status != "new"]
    open_lengths = [len(request.token_ids) for request in requests if request.finish_reason is None]
    return min(open_lengths) if open_lengths else max(len(request.token_ids) for request in requests)


def _ask(criteria: list[StoppingCriteria], batch: PaddedBatch, length: int) -> list[bool]:
    """Which rows have to end with `length` generated tokens; those that ended before hold padding."""
    ids = batch.token_ids[:, : batch.prompt_length + length]
    first, scores = batch.requests[0], None
    if len(ids) == 1 and first is not None and first.keep_scores:
        scores = tuple(score[None] for score in first.scores[:length])
    is_done = torch.zeros(len(ids), dtype=torch.bool)
    for criterion in criteria:
        is_done |= torch.as_tensor(criterion(ids, scores)).to("cpu", torch.bool)
    return is_done.tolist()


def _raise_failures(batch: PaddedBatch, length: int | None) -> None:
    """Raises what ended a row with exactly `length` tokens, or with any number, if its request is not alone."""
    for request in batch.requests:
        if request is not None and request.error is not None and not request.is_alone:
            if length is None or len(request.token_ids) == length:
                raise request.error
