"""Where a row ends in a round: at the earliest of eos, budget, stop string and time.

Other stopping criteria are asked later, see `criteria`.
"""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import MaxTimeCriteria, StopStringCriteria

from .request import FinishReason
from .results import RowResult

PRECEDENCE: tuple[FinishReason, ...] = ("eos", "stop", "time", "criteria", "length")  # of reasons at one token


def apply_stops(results: list[RowResult]) -> list[RowResult]:
    """
    Cuts the tokens of each row at its first stop.

    Args:
        results (`list[RowResult]`):
            What the rows would take if nothing ended them but failures. A failure behind a stop is none.
    """
    results = [_with_text_stop(_with_natural_stop(result)) for result in results]
    batches: dict[int, list[int]] = {}
    for index, result in enumerate(results):
        if result.request.rules.stopping_criteria and result.token_ids:
            batches.setdefault(id(result.request.batch), []).append(index)
    for indices in batches.values():
        for index, result in zip(indices, _with_known_criteria([results[index] for index in indices])):
            results[index] = result
    return results


def ended(result: RowResult, num_tokens: int, reason: FinishReason) -> RowResult:
    """The result if `reason` ends the row after `num_tokens` tokens, unless it ends before."""
    if num_tokens > len(result.token_ids):
        return result
    if num_tokens == len(result.token_ids) and not precedes(reason, result.finish_reason):
        return result
    return replace(result, token_ids=result.token_ids[:num_tokens], finish_reason=reason, error=None)


def precedes(reason: FinishReason, other: FinishReason | None) -> bool:
    """Whether `reason` goes before `other` where both end a row at the same token."""
    return other not in PRECEDENCE or PRECEDENCE.index(reason) < PRECEDENCE.index(other)


def _with_natural_stop(result: RowResult) -> RowResult:
    request, room = result.request, result.request.num_remaining
    eos_token_ids = request.rules.eos_token_ids
    for count, token_id in enumerate(result.token_ids[:room], start=1):
        if token_id in eos_token_ids:
            return ended(result, count, "eos")
    return ended(result, room, "length")


def _with_text_stop(result: RowResult) -> RowResult:
    follower, so_far = result.request.text, result.request.token_ids
    if follower is None or not result.token_ids:
        return result
    try:
        stop = follower.first_stop(so_far, result.token_ids)
    except Exception as error:
        num_read = 0
        while _can_follow(result, num_read + 1):
            num_read += 1
        return replace(result, token_ids=result.token_ids[:num_read], finish_reason="error", error=error)
    return result if stop is None else ended(result, stop, "stop")


def _can_follow(result: RowResult, num_tokens: int) -> bool:
    """Whether the follower can read the first `num_tokens` of new tokens that it failed to read as a whole."""
    follower = result.request.text
    assert follower is not None, "asked only of requests with a text"
    if num_tokens >= len(result.token_ids):
        return False
    try:
        follower.first_stop(result.request.token_ids, result.token_ids[:num_tokens])
    except Exception:
        return False
    return True


def _with_known_criteria(results: list[RowResult]) -> list[RowResult]:
    """The rows of one batch, ended by the criteria that are the same for each token whenever they are asked."""
    batch, rules = results[0].request.batch, results[0].request.rules
    for result in results:
        token_ids = torch.tensor(result.token_ids, device=batch.token_ids.device)
        batch.draft(result.request.batch_row, result.start, token_ids)
    for criterion in rules.stopping_criteria:
        if type(criterion) is MaxTimeCriteria:  # a fact about now, not about a token
            if bool(criterion(batch.token_ids[:1, :1], None).any()):
                results = [ended(result, len(result.token_ids), "time") for result in results]
        elif type(criterion) is StopStringCriteria:
            results = _with_stop_strings(criterion, results)
    return results


def _with_stop_strings(criterion: StopStringCriteria, results: list[RowResult]) -> list[RowResult]:
    """All rows and positions in one call: the criterion reads the last `maximum_token_len` ids only."""
    width = criterion.maximum_token_len
    windows, owners = [], []
    for index, result in enumerate(results):
        start = result.request.batch.prompt_length + result.start + 1
        row = result.request.batch.token_ids[result.request.batch_row]
        for count in range(1, len(result.token_ids) + 1):
            windows.append(_last(row[: start + count - 1], width))
            owners.append((index, count))
    results = list(results)
    for (index, count), is_done in zip(owners, criterion(torch.stack(windows), None).tolist()):
        if is_done:
            results[index] = ended(results[index], count, "stop")  # the first one that is found is the earliest
    return results


def _last(row: Tensor, width: int) -> Tensor:
    """The last `width` ids; before a shorter row an id outside any vocabulary, which the criterion never matches."""
    if len(row) >= width:
        return row[-width:]
    return torch.cat([row.new_full((width - len(row),), torch.iinfo(torch.int32).max), row])
