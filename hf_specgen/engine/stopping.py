"""Where a row ends: the earliest of eos, budget, stop string or any other stopping criterion."""

import torch
from torch import Tensor
from transformers import MaxTimeCriteria, StoppingCriteria, StopStringCriteria

from .request import PaddedBatch, Request


def cut(requests: list[Request], token_lists: list[list[int]]) -> list[tuple[int, str | None]]:
    """
    How many of the new tokens each request takes, and why it ends there.

    Args:
        requests (`list[Request]`):
            Requests that are being decoded.
        token_lists (`list[list[int]]`):
            The new tokens of each, at least one.

    Returns:
        Per request the number of tokens taken, at least 1, and the finish reason, None if the request goes on.
    """
    cuts = [_natural_cut(request, tokens) for request, tokens in zip(requests, token_lists)]
    for index, request in enumerate(requests):
        if request.rules.text_stop is not None:
            cuts[index] = _text_cut(request, token_lists[index], *cuts[index])
    batches: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        if request.rules.stopping_criteria:
            batches.setdefault(id(request.batch), []).append(index)
    for indices in batches.values():
        members = [requests[index] for index in indices]
        tokens = [token_lists[index][: cuts[index][0]] for index in indices]
        try:
            found = _first_stops(members, tokens)
        except Exception as error:
            if not members[0].is_alone:
                raise
            members[0].error = error
            continue
        for index, stop in zip(indices, found):
            taken, reason = cuts[index]
            if stop is not None and (stop[0] < taken or reason != "eos"):
                cuts[index] = stop
    return cuts


def _natural_cut(request: Request, tokens: list[int]) -> tuple[int, str | None]:
    for count, token_id in enumerate(tokens[: request.num_remaining], start=1):
        if token_id in request.rules.eos_token_ids:
            return count, "eos"
    if len(tokens) >= request.num_remaining:
        return request.num_remaining, "length"
    return len(tokens), None


def _text_cut(request: Request, tokens: list[int], taken: int, reason: str | None) -> tuple[int, str | None]:
    """The natural cut, or an earlier one by a stop string."""
    assert request.rules.text_stop is not None, "asked only of requests with a text"
    try:
        stop = request.rules.text_stop.first_stop(request.token_ids, tokens[:taken])
    except Exception as error:
        if not request.is_alone:
            raise
        request.error = error
        return taken, reason
    if stop is not None and (stop < taken or reason != "eos"):
        return stop, "stop"
    return taken, reason


def _first_stops(requests: list[Request], token_lists: list[list[int]]) -> list[tuple[int, str] | None]:
    """The first stop by the criteria that the requests of one batch share."""
    batch = requests[0].batch
    for request, tokens in zip(requests, token_lists):
        token_ids = torch.tensor(tokens, device=batch.token_ids.device)
        batch.draft(request.batch_row, len(request.token_ids), token_ids)
    stops: list[tuple[int, str] | None] = [None] * len(requests)
    others = []
    for criterion in batch.rules.stopping_criteria:
        if type(criterion) is MaxTimeCriteria:  # a fact about now, not about a token
            is_late = bool(criterion(batch.token_ids[:1, :1], None).any())
            found = [(len(tokens), "time") if is_late else None for tokens in token_lists]
        elif type(criterion) is StopStringCriteria:
            found = _judge_stop_strings(criterion, requests, token_lists)
        else:
            others.append(criterion)
            continue
        stops = [_earlier(stop, other) for stop, other in zip(stops, found)]
    # No criterion is asked about what comes behind another's stop.
    token_lists = [tokens if stop is None else tokens[: stop[0]] for tokens, stop in zip(token_lists, stops)]
    found = _judge_by_length(others, batch, requests, token_lists)
    return [_earlier(stop, other) for stop, other in zip(stops, found)]


def _earlier(stop: tuple[int, str] | None, other: tuple[int, str] | None) -> tuple[int, str] | None:
    if stop is None or other is None:
        return other if stop is None else stop
    return other if other[0] < stop[0] else stop


def _judge_stop_strings(
    criterion: StopStringCriteria, requests: list[Request], token_lists: list[list[int]]
) -> list[tuple[int, str] | None]:
    """All rows and positions in one call: the criterion reads the last `maximum_token_len` ids only."""
    width = criterion.maximum_token_len
    windows, owners = [], []
    for index, (request, tokens) in enumerate(zip(requests, token_lists)):
        start = request.batch.prompt_length + len(request.token_ids) + 1
        row = request.batch.token_ids[request.batch_row]
        for count in range(1, len(tokens) + 1):
            windows.append(_last(row[: start + count - 1], width))
            owners.append((index, count))
    stops: list[tuple[int, str] | None] = [None] * len(requests)
    for (index, count), is_done in zip(owners, criterion(torch.stack(windows), None).tolist()):
        if is_done and stops[index] is None:
            stops[index] = (count, "stop")
    return stops


def _last(row: Tensor, width: int) -> Tensor:
    """The last `width` ids; before a shorter row an id outside any vocabulary, which the criterion never matches."""
    if len(row) >= width:
        return row[-width:]
    return torch.cat([row.new_full((width - len(row),), torch.iinfo(torch.int32).max), row])


def _judge_by_length(
    criteria: list[StoppingCriteria], batch: PaddedBatch, requests: list[Request], token_lists: list[list[int]]
) -> list[tuple[int, str] | None]:
    """One call of each on the whole padded batch per distinct number of generated tokens, in growing order."""
    stops: list[tuple[int, str] | None] = [None] * len(requests)
    starts = [len(request.token_ids) for request in requests]
    lengths = {start + n for start, tokens in zip(starts, token_lists) for n in range(1, len(tokens) + 1)}
    for length in sorted(lengths) if criteria else []:
        judged = [
            index
            for index, (start, tokens) in enumerate(zip(starts, token_lists))
            if stops[index] is None and start < length <= start + len(tokens)
        ]
        if not judged:
            continue
        ids = batch.token_ids[:, : batch.prompt_length + length]
        is_lone = len(ids) == 1 and requests[0].keep_scores
        scores = tuple(score[None] for score in requests[0].scores[:length]) if is_lone else None
        for criterion in criteria:
            is_done = torch.as_tensor(criterion(ids, scores)).expand(len(ids)).tolist()
            for index in judged:
                if is_done[requests[index].batch_row]:
                    stops[index] = (length - starts[index], "criteria")
    return stops
