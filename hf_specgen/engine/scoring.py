"""Processors and warpers over rows x positions: which of them is applied how.

Three ways, in the order of the caller's list: processors that do not read ids judge all rows and positions at once;
our penalties add the uncommitted candidates to their sparse counts; any other is called on the whole padded batch,
once per distinct number of generated tokens, and each row uses the call at its own length.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

from ..logits_process.bias_and_masks import LogitBias, UndecodableMask
from ..logits_process.token_penalties import TokenPenalties
from .batch import Rows
from .request import Request
from .rules import DecodingRules

Judge = Callable[..., None]
IGNORES_IDS = {
    LogitBias,
    UndecodableMask,
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.TopHLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
    hf.SuppressTokensLogitsProcessor,
}


HF_MODULE = hf.TemperatureLogitsWarper.__module__
CALLS_BACK = (hf.PrefixConstrainedLogitsProcessor, hf.UnbatchedClassifierFreeGuidanceLogitsProcessor)


def unknown_processors(rules: DecodingRules) -> list[LogitsProcessor]:
    """Processors of which nothing is known, so that they may remember what they are called with."""
    return [
        processor
        for processor in rules.logits_processor
        if type(processor) not in IGNORES_IDS
        and type(processor).__call__ is not TokenPenalties.__call__
        and (type(processor).__module__ != HF_MODULE or isinstance(processor, CALLS_BACK))
    ]


@dataclass(frozen=True)
class Failure:
    """A processor raised `error` when it judged what follows the first `position` candidates of a row."""

    position: int
    error: Exception


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
        judged = _Block(members, candidate_ids[index], lengths[index].tolist(), first)
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
    judged = _Block([(row, request)], candidate_ids[[row]], [position], first=position)
    for processor in request.rules.logits_processor:
        block = judged.process(processor, block)
        if not _all_possible(block):
            return f"`{type(processor).__name__}`"
    return "the combination of processors"


def _all_possible(block: Tensor) -> bool:
    return bool((block.amax(dim=-1) > -torch.inf).all())


Member = tuple[int, Request]  # a row of the round's tensors and its request


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


class _Block:
    """The rows of one batch in a round: `members` at `positions` that follow `first` candidates."""

    def __init__(self, members: list[Member], candidate_ids: Tensor, lengths: list[int], first: int):
        self.batch = members[0][1].batch
        self.candidate_ids = candidate_ids
        self.first = first
        self.lengths = lengths
        self.batch_rows = [request.batch_row for _, request in members]
        self.num_generated = [len(request.token_ids) for _, request in members]
        self.failures: dict[int, Failure] = {}

    def process(self, processor: LogitsProcessor, block: Tensor) -> Tensor:
        """Applies one processor to `block` of shape `(members, positions, vocab)`, possibly in place."""
        if type(processor) in IGNORES_IDS:
            flat = block.reshape(-1, block.shape[-1])
            no_ids = self.candidate_ids.new_zeros(flat.shape[0], 1)
            return processor(no_ids, flat).reshape(block.shape)
        if type(processor).__call__ is TokenPenalties.__call__:  # a subclass may have changed the rule
            counts = self.batch.counts(processor)
            processor.apply_(block, counts, self.batch_rows, self.candidate_ids, self.first)
            return block
        judge = self._judge
        if type(processor) is hf.PrefixConstrainedLogitsProcessor:
            judge = self._judge_prefixes
        for count, members in self._members_by_length(block.shape[1]):
            members = [member for member in members if member not in self.failures]
            for group in self._members_by_state(processor, count, members):
                self._judge_together(judge, processor, block, count, group)
        return block

    def _members_by_state(self, processor: LogitsProcessor, count: int, members: list[int]) -> list[list[int]]:
        """Members for which the processor remembers the same."""
        memory = self.batch.memories.get(id(processor))
        if memory is None:
            return [members] if members else []
        groups: dict[int, list[int]] = {}
        for member in members:
            state = memory.before(self.batch_rows[member], count - self.num_generated[member])
            groups.setdefault(id(state), []).append(member)
        return list(groups.values())

    def _call(
        self, judge: Judge, processor: LogitsProcessor, block: Tensor, ids: Tensor, count: int, members: list[int]
    ) -> None:
        """Judges rows in one call, in the state that they have in common."""
        memory = self.batch.memories.get(id(processor))
        if memory is None:
            judge(processor, block, ids, count, members)
            return
        places = [(self.batch_rows[member], count - self.num_generated[member]) for member in members]
        state = memory.before(*places[0])
        memory.load(state)
        judge(processor, block, ids, count, members)
        memory.note(state, places)

    def _members_by_length(self, num_positions: int) -> list[tuple[int, list[int]]]:
        """In growing order, the numbers of generated tokens at which rows are judged, and these rows."""
        wanted: dict[int, list[int]] = {}
        for member, (generated, length) in enumerate(zip(self.num_generated, self.lengths)):
            for position in range(min(num_positions, length - self.first + 1)):
                wanted.setdefault(generated + self.first + position, []).append(member)
        return sorted(wanted.items())

    def _judge_together(
        self, judge: Judge, processor: LogitsProcessor, block: Tensor, count: int, members: list[int]
    ) -> None:
        """Judges rows in one call; if that fails, one by one, to find out whose failure it is."""
        ids = self.batch.token_ids[:, : self.batch.prompt_length + count]
        try:
            self._call(judge, processor, block, ids, count, members)
        except Exception as error:
            for member in members:
                # With no filled row among them, this very call is the one that plain decoding would make.
                cause = (
                    error
                    if len(members) == len(self.batch_rows)
                    else self._own_failure(judge, processor, block, count, member)
                )
                if cause is not None:
                    self.failures[member] = Failure(count - self.num_generated[member], cause)

    def _own_failure(
        self, judge: Judge, processor: LogitsProcessor, block: Tensor, count: int, member: int
    ) -> Exception | None:
        """What the processor raises for one row, with the others as if they had ended long ago."""
        ids = self.batch.token_ids[:, : self.batch.prompt_length + count].clone()
        others = [row for row in range(len(ids)) if row != self.batch_rows[member]]
        ids[others, self.batch.prompt_length :] = self.batch.pad_token_id
        try:
            self._call(judge, processor, block, ids, count, [member])
        except Exception as error:
            return error
        return None

    def _judge(self, processor: LogitsProcessor, block: Tensor, ids: Tensor, count: int, members: list[int]) -> None:
        """One call on the whole padded batch, as plain `generate` makes it; rows that are not judged hold zeros."""
        positions = [count - self.first - self.num_generated[member] for member in members]
        batch_rows = [self.batch_rows[member] for member in members]
        scores = block.new_zeros(len(ids), block.shape[-1])
        scores[batch_rows] = block[members, positions]
        block[members, positions] = processor(ids, scores)[batch_rows].to(block.dtype)

    def _judge_prefixes(
        self,
        processor: hf.PrefixConstrainedLogitsProcessor,
        block: Tensor,
        ids: Tensor,
        count: int,
        members: list[int],
    ) -> None:
        """The caller's function judges one row at a time, so that no row needs filling."""
        for member in members:
            row, position = self.batch_rows[member], count - self.first - self.num_generated[member]
            allowed_ids = processor._prefix_allowed_tokens_fn(row // processor._num_beams, ids[row])
            if len(allowed_ids) == 0:
                raise ValueError(f"`prefix_allowed_tokens_fn` allows no token after {ids[row].tolist()} in row {row}.")
            allowed = torch.full_like(block[member, position], -torch.inf)
            allowed[allowed_ids] = 0.0
            judged = block[member, position] + allowed
            # As in transformers, the constraint holds even where others have forbidden all that it allows.
            block[member, position] = torch.where(judged.amax() == -torch.inf, allowed, judged)
