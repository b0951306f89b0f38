"""Processors and warpers over rows x positions: which of them is applied how.

Three ways: processors that do not read ids judge all rows and positions at once; our penalties add the uncommitted
candidates to their sparse counts; any other is called on the whole padded batch, once per distinct number of generated
tokens, and each row uses the call at its own length.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

from ..logits_process.bias_and_masks import LogitBias, UndecodableMask
from ..logits_process.token_penalties import TokenPenalties
from .memory import Memory
from .request import Request
from .rules import DecodingRules

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


Member = tuple[int, Request]  # a row of the round's tensors and its request


@dataclass(frozen=True)
class Failure:
    """A processor raised `error` when it judged what follows the first `position` candidates of a row."""

    position: int
    error: Exception


@dataclass(frozen=True)
class _Call:
    """One call of a processor: for some `members` of a block, after `count` generated tokens, with `ids`."""

    processor: LogitsProcessor
    ids: Tensor  # (batch rows, length)
    count: int
    members: list[int]


class Block:
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
        for count, members in self._members_by_length(block.shape[1]):
            members = [member for member in members if member not in self.failures]
            ids = self.batch.token_ids[:, : self.batch.prompt_length + count]
            for group in self._members_by_state(processor, count, members):
                self._judge_together(block, _Call(processor, ids, count, group))
        return block

    def _members_by_length(self, num_positions: int) -> list[tuple[int, list[int]]]:
        """In growing order, the numbers of generated tokens at which rows are judged, and these rows."""
        wanted: dict[int, list[int]] = {}
        for member, (generated, length) in enumerate(zip(self.num_generated, self.lengths)):
            for position in range(min(num_positions, length - self.first + 1)):
                wanted.setdefault(generated + self.first + position, []).append(member)
        return sorted(wanted.items())

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

    def _judge_together(self, block: Tensor, call: _Call) -> None:
        """Judges rows in one call; if that fails, one by one, to find out whose failure it is."""
        try:
            self._judge(block, call)
        except Exception as error:
            for member in call.members:
                # With no filled row among them, this very call is the one that plain decoding would make.
                is_whole = len(call.members) == len(self.batch_rows)
                cause = error if is_whole else self._own_failure(block, call, member)
                if cause is not None:
                    self.failures[member] = Failure(call.count - self.num_generated[member], cause)

    def _own_failure(self, block: Tensor, call: _Call, member: int) -> Exception | None:
        """What the processor raises for one row, with the others as if they had ended long ago."""
        ids = call.ids.clone()
        others = [row for row in range(len(ids)) if row != self.batch_rows[member]]
        ids[others, self.batch.prompt_length :] = self.batch.pad_token_id
        try:
            self._judge(block, replace(call, ids=ids, members=[member]))
        except Exception as error:
            return error
        return None

    def _judge(self, block: Tensor, call: _Call) -> None:
        """Judges rows in one call, in the state that they have in common."""
        memory = self.batch.memories.get(id(call.processor))
        if memory is None:
            self._run(block, call)
            return
        places = [(self.batch_rows[member], call.count - self.num_generated[member]) for member in call.members]
        state = memory.before(*places[0])
        memory.load(state)
        behind = self._rows_behind(call) if memory.is_used else []
        raw = block.clone() if behind else block
        self._run(block, call)
        memory.note(state, places)
        if behind and self._mixes_rows(memory, raw, block, call, behind):
            raise ValueError(
                f"`{type(call.processor).__name__}` remembers what it was called with and mixes the rows of a batch. "
                "While candidates are verified these have different numbers of tokens: call `generate` with one row "
                "at a time, or without a drafter."
            )

    def _rows_behind(self, call: _Call) -> list[tuple[int, int]]:
        """Rows that a call shows with filler, and how many of their generated tokens are true."""
        judged = {self.batch_rows[member] for member in call.members}
        return [
            (row, len(request.token_ids))
            for row, request in enumerate(self.batch.requests)
            if row not in judged and request is not None and request.finish_reason is None
            if len(request.token_ids) < call.count
        ]

    def _mixes_rows(
        self, memory: Memory, raw: Tensor, judged: Tensor, call: _Call, behind: list[tuple[int, int]]
    ) -> bool:
        """Whether the scores of a row hang on what is filled into other rows; those drawn by chance do not count."""
        members = call.members
        positions = [call.count - self.first - self.num_generated[member] for member in members]
        row, position = self.batch_rows[members[0]], positions[0] + self.first
        other_ids = call.ids.clone()
        for other, num_true in behind:
            filled = other_ids[other, self.batch.prompt_length + num_true :]
            filled.copy_((filled + 1) % judged.shape[-1])
        is_same = []
        try:
            for ids in (other_ids, call.ids):
                memory.load(memory.before(row, position))
                trial = raw.clone()
                self._run(trial, replace(call, ids=ids))
                is_same.append(torch.equal(trial[members, positions], judged[members, positions]))
                if is_same[0]:
                    return False
        except Exception:  # about ids that it would never have seen
            return False
        finally:
            memory.load(memory.before(row, position + 1))
        return is_same[1]

    def _run(self, block: Tensor, call: _Call) -> None:
        """One call on the whole padded batch, as plain `generate` makes it; rows that are not judged hold zeros."""
        if type(call.processor) is hf.PrefixConstrainedLogitsProcessor:
            self._constrain_prefixes(call.processor, block, call)
            return
        positions = [call.count - self.first - self.num_generated[member] for member in call.members]
        batch_rows = [self.batch_rows[member] for member in call.members]
        scores = block.new_zeros(len(call.ids), block.shape[-1])
        scores[batch_rows] = block[call.members, positions]
        block[call.members, positions] = call.processor(call.ids, scores)[batch_rows].to(block.dtype)

    def _constrain_prefixes(self, processor: hf.PrefixConstrainedLogitsProcessor, block: Tensor, call: _Call) -> None:
        """The caller's function judges one row at a time, so that no row needs filling."""
        for member in call.members:
            row, position = self.batch_rows[member], call.count - self.first - self.num_generated[member]
            allowed_ids = processor._prefix_allowed_tokens_fn(row // processor._num_beams, call.ids[row])
            if len(allowed_ids) == 0:
                raise ValueError(
                    f"`prefix_allowed_tokens_fn` allows no token after {call.ids[row].tolist()} in row {row}."
                )
            allowed = torch.full_like(block[member, position], -torch.inf)
            allowed[allowed_ids] = 0.0
            judged = block[member, position] + allowed
            # As in transformers, the constraint holds even where others have forbidden all that it allows.
            block[member, position] = torch.where(judged.amax() == -torch.inf, allowed, judged)
