"""Processed scores of the rows of a round, each by its own request's processors in the order of the caller's list."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import Rows
from .judging import Block, Failure, Member


@dataclass(frozen=True)
class Scores:
    """
    Processed scores of consecutive positions of every row.

    Args:
        values (`torch.FloatTensor` of shape `(rows, positions, vocab)`):
            The scores in fp32; -inf from the position of a failure on.
        failures (`dict[int, Failure]`):
            By row the first position that a processor failed to judge. Plain decoding may never reach it.
    """

    values: Tensor
    failures: dict[int, Failure]


def score(rows: Rows, logits: Tensor, candidate_ids: Tensor, lengths: Tensor, first: int = 0) -> Scores:
    """
    Applies each row's processors to its scores.

    Args:
        rows ([`Rows`]):
            The rows; those of the span take part.
        logits (`torch.Tensor` of shape `(rows, positions, vocab)`):
            The model's raw output; left as it is.
        candidate_ids (`torch.LongTensor` of shape `(rows, k)`):
            Uncommitted tokens; position `j` is judged after the first `first + j` of them.
        lengths (`torch.LongTensor` of shape `(rows,)`, on the CPU):
            How many of them count in each row; positions beyond are left in some undefined state.
        first (`int`, *optional*, defaults to 0):
            The number of candidates before position 0.
    """
    groups = _groups(rows)
    if not groups:
        return Scores(logits.to(rows.device, torch.float32), {})
    scores = logits.to(rows.device, torch.float32, copy=True)
    failures: dict[int, Failure] = {}
    for members in groups:
        _draft(members, candidate_ids)
        index = [row for row, _ in members]
        block = scores if len(index) == scores.shape[0] else scores[index]
        judged = Block(members, candidate_ids[index], lengths[index].tolist(), first)
        for processor in members[0][1].rules.logits_processor:
            block = judged.process(processor, block)
        if len(index) == scores.shape[0]:
            scores = block
        else:
            scores[index] = block
        failures |= {index[member]: failure for member, failure in judged.failures.items()}
    for row, failure in failures.items():
        scores[row, failure.position - first :] = -torch.inf
    return Scores(scores, failures)


def name_masking_processor(rows: Rows, logits: Tensor, candidate_ids: Tensor, row: int, position: int) -> str:
    """The first processor that leaves `position` of row `row` without a token of finite score."""
    (request,) = [other for index, other in rows.live() if index == row]
    block = logits[[row], position : position + 1].to(rows.device, torch.float32, copy=True)
    if not _all_possible(block):
        return "the model's own logits"
    judged = Block([(row, request)], candidate_ids[[row]], [position], first=position)
    for processor in request.rules.logits_processor:
        block = judged.process(processor, block)
        if not _all_possible(block):
            return f"`{type(processor).__name__}`"
    return "the combination of processors"


def _all_possible(block: Tensor) -> bool:
    return bool((block.amax(dim=-1) > -torch.inf).all())


def _groups(rows: Rows) -> list[list[Member]]:
    """The live rows by the batch that they share, without those that have no processors."""
    groups: dict[int, list[Member]] = {}
    for row, request in rows.live():
        if request.rules.logits_processor:
            groups.setdefault(id(request.batch), []).append((row, request))
    return list(groups.values())


def _draft(members: list[Member], candidate_ids: Tensor) -> None:
    if candidate_ids.shape[1] == 0:
        return
    for row, request in members:
        request.batch.draft(request.batch_row, len(request.token_ids), candidate_ids[row])
