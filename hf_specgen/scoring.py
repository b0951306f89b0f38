"""Processors and warpers over rows x positions: which of them is applied how.

Three ways, in the order of the caller's list: processors that do not read ids judge all rows and positions at once;
our penalties add the uncommitted candidates to their sparse counts; any other is called on the whole padded batch,
once per distinct number of generated tokens, and each row uses the call at its own length.
"""

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

from .logits_process import LogitBias, TokenPenalties, UndecodableMask
from .request import PaddedBatch, Request
from .rows import Rows

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


def score(rows: Rows, logits: Tensor, candidate_ids: Tensor, lengths: Tensor, first: int = 0) -> Tensor:
    """
    The processed scores of consecutive positions of every row.

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

    Returns:
        `torch.FloatTensor` of shape `(rows, positions, vocab)`, in fp32.
    """
    groups = _groups(rows)
    if not groups:
        return logits.to(rows.device, torch.float32)
    scores = logits.to(rows.device, torch.float32, copy=True)
    for batch, members in groups:
        _draft(members, candidate_ids)
        index = [row for row, _ in members]
        block = scores if len(index) == scores.shape[0] else scores[index]
        judged = _Block(batch, members, candidate_ids[index], lengths[index].tolist(), first)
        try:
            for processor in batch.rules.logits_processor:
                block = judged.process(processor, block)
        except Exception as error:
            if not members[0][1].is_alone:
                raise
            members[0][1].error = error
        if len(index) == scores.shape[0]:
            scores = block
        else:
            scores[index] = block
    return scores


def name_masking_processor(rows: Rows, logits: Tensor, candidate_ids: Tensor, lengths: Tensor, row: int) -> str:
    """The first processor that leaves row `row` without a token of finite score at some position that counts."""
    ((batch, member),) = [(r.batch, (i, r)) for i, r in rows.live() if i == row]
    block = logits[[row], : int(lengths[row]) + 1].to(dtype=torch.float32, copy=True)
    if not _all_possible(block):
        return "the model's own logits"
    judged = _Block(batch, [member], candidate_ids[[row]], [int(lengths[row])], 0)
    for processor in batch.rules.logits_processor:
        block = judged.process(processor, block)
        if not _all_possible(block):
            return f"`{type(processor).__name__}`"
    return "the combination of processors"


def _all_possible(block: Tensor) -> bool:
    return bool((block.amax(dim=-1) > -torch.inf).all())


def _groups(rows: Rows) -> list[tuple[PaddedBatch, list[tuple[int, Request]]]]:
    """The live rows by the batch that they share, without those that have no processors."""
    groups: dict[int, tuple[PaddedBatch, list[tuple[int, Request]]]] = {}
    for row, request in rows.live():
        if request.rules.logits_processor and request.error is None:
            groups.setdefault(id(request.batch), (request.batch, []))[1].append((row, request))
    return list(groups.values())


def _draft(members: list[tuple[int, Request]], candidate_ids: Tensor) -> None:
    if candidate_ids.shape[1] == 0:
        return
    for row, request in members:
        request.batch.draft(request.batch_row, len(request.token_ids), candidate_ids[row])


class _Block:
    """The rows of one batch in a round: `members` at `positions` that follow `first` candidates."""

    def __init__(
        self,
        batch: PaddedBatch,
        members: list[tuple[int, Request]],
        candidate_ids: Tensor,
        lengths: list[int],
        first: int,
    ):
        self.batch = batch
        self.candidate_ids = candidate_ids
        self.first = first
        self.lengths = lengths
        self.batch_rows = [request.batch_row for _, request in members]
        self.num_generated = [len(request.token_ids) for _, request in members]

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
        if type(processor) is hf.PrefixConstrainedLogitsProcessor:
            return self._process_prefixes(processor, block)
        return self._process_by_length(processor, block)

    def _process_prefixes(self, processor: hf.PrefixConstrainedLogitsProcessor, block: Tensor) -> Tensor:
        """The caller's function judges one row at a time, and only prefixes that plain decoding can reach."""
        scores = torch.full_like(block, -torch.inf)
        for member, (row, generated) in enumerate(zip(self.batch_rows, self.num_generated)):
            for position in range(min(block.shape[1], self.lengths[member] - self.first + 1)):
                if self._is_unreachable(scores, member, position):
                    break
                ids = self.batch.token_ids[row, : self.batch.prompt_length + generated + self.first + position]
                allowed_ids = processor._prefix_allowed_tokens_fn(row // processor._num_beams, ids)
                if len(allowed_ids) == 0:
                    raise ValueError(f"`prefix_allowed_tokens_fn` allows no token after {ids.tolist()} in row {row}.")
                allowed = torch.full_like(block[member, position], -torch.inf)
                allowed[allowed_ids] = 0.0
                judged = block[member, position] + allowed
                # As in transformers, the constraint holds even where others have forbidden all that it allows.
                scores[member, position] = torch.where(judged.amax() == -torch.inf, allowed, judged)
        return scores

    def _process_by_length(self, processor: LogitsProcessor, block: Tensor) -> Tensor:
        """Calls the processor once per distinct number of generated tokens, as plain `generate` would."""
        wanted: dict[int, list[int]] = {}
        for member, (generated, length) in enumerate(zip(self.num_generated, self.lengths)):
            last = min(block.shape[1] - 1, length - self.first)
            for position in range(last + 1):
                wanted.setdefault(generated + self.first + position, []).append(member)
        for count in sorted(wanted):
            members = wanted[count]
            positions = [count - self.first - self.num_generated[member] for member in members]
            batch_rows = [self.batch_rows[member] for member in members]
            scores = block.new_zeros(self.batch.token_ids.shape[0], block.shape[-1])
            scores[batch_rows] = block[members, positions]
            ids = self.batch.token_ids[:, : self.batch.prompt_length + count]
            try:
                block[members, positions] = processor(ids, scores)[batch_rows]
            except Exception:
                self._process_reachable(processor, block, count, members)
        return block

    def _process_reachable(self, processor: LogitsProcessor, block: Tensor, count: int, members: list[int]) -> None:
        """
        A processor may refuse a prefix that plain decoding never reaches: one with a candidate that the processors
        have ruled out. Such rows are masked from this position on, the others are judged one by one.
        """
        for member in members:
            position = count - self.first - self.num_generated[member]
            if self._is_unreachable(block, member, position):
                block[member, position] = 0.0
                continue
            row = self.batch_rows[member]
            scores = block.new_zeros(self.batch.token_ids.shape[0], block.shape[-1])
            scores[row] = block[member, position]
            ids = self.batch.token_ids[:, : self.batch.prompt_length + count].clone()
            for other in range(len(ids)):
                if other != row:
                    ids[other, self.batch.prompt_length :] = self.batch.rules.pad_token_id
            block[member, position] = processor(ids, scores)[row]

    def _is_unreachable(self, block: Tensor, member: int, position: int) -> bool:
        judged = self.candidate_ids[member, self.first : self.first + position]
        earlier = block[member, :position].gather(1, judged[:, None])
        return bool((earlier == -torch.inf).any())
