"""Drafter: the contract of what proposes candidates for a round."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..layers.slot_cache import SlotCache
from .batch import Rows
from .limits import CANDIDATE_COLUMNS
from .verification import Candidates

MAX_CANDIDATES = CANDIDATE_COLUMNS - 1  # of a row in one round; the anchor takes a column too


def hidden_state_indices(layer_ids: Iterable[int]) -> list[int]:
    """Where the outputs of layers stand in `hidden_states`, whose first entry is the embedding output (layer -1)."""
    return [layer + 1 for layer in layer_ids]


class Drafter(ABC):
    """
    What proposes candidates for a round. A drafter has to have `make_cache`, `draft` and `observe`; the rest has
    defaults that fit a drafter without a model.

    The loop calls `bind` and `make_cache` once. In every round it calls `draft`, unless no row can use a candidate,
    and after the target's pass `observe`, which also sees each prefill pass. After a pass that failed it calls
    `recover` for each slot.

    Attributes:
        model (`PreTrainedModel`, *optional*): the causal language model that drafts, if there is one. Its attention,
            vocabulary and positions are checked as the target's are.
        num_forwards (`int`): forward passes of the drafter so far; the loop reads it for its counts.
        target_layer_ids (`tuple[int, ...]`): layers of the target whose output `observe` needs, counted from 0, -1
            for the embedding output; `hidden_state_indices` says where they stand in `outputs.hidden_states`.
    """

    target_layer_ids: tuple[int, ...] = ()
    num_forwards: int = 0
    model: PreTrainedModel | None = None

    @property
    def config(self) -> None:
        """transformers' own loop asks for it on a model that is not prepared; the error says what to do."""
        raise AttributeError(
            f"A `{type(self).__name__}` drafts in this package's loop only: call `enable_speculation(model)` first."
        )

    def bind(self, target: PreTrainedModel) -> None:  # noqa: B027  # most drafters serve any target
        """Called once before decoding with the target; raises `ValueError` if this drafter is not for it."""

    def target_kwargs(self) -> dict[str, Any]:
        """What the target's passes are called with, beyond their tokens, so that `observe` finds what it needs."""
        layer_ids = self.target_layer_ids
        return {"output_hidden_states": hidden_state_indices(layer_ids)} if layer_ids else {}

    def recover(self, rows: Rows, slot: int) -> None:
        """
        Called for each slot after a pass that failed, with caches that are rolled back to what is committed. Cuts
        them further if this drafter cannot go on from there: states of the target that it has not observed are gone,
        and are computed again if the target's cache is cut to their number.
        """
        if self.target_layer_ids:
            rows.cache.truncate(slot, int(rows.draft_cache.lengths[slot]))

    @abstractmethod
    def make_cache(self, rows: int) -> SlotCache | None:
        """A cache for `rows` rows, None if drafting needs none. `Rows` rolls it back with the target's."""

    @abstractmethod
    def draft(self, rows: Rows, max_tokens: Tensor) -> Candidates:
        """
        Proposes candidates for the rows of the span.

        Args:
            rows ([`Rows`]):
                The rows. Their drafter cache holds at most all committed tokens but the last; what is missing is
                fed here.
            max_tokens (`torch.LongTensor` of shape `(rows,)`, on the CPU):
                The most candidates that each row can use, 0 in empty slots.
        """

    @abstractmethod
    def observe(self, rows: Rows, candidates: Candidates, outputs: ModelOutput) -> None:
        """
        Sees the target's output before anything is committed.

        Args:
            rows ([`Rows`]):
                The rows as they were when the candidates were drafted.
            candidates ([`Candidates`]):
                What was verified; no candidates in a prefill.
            outputs (`ModelOutput`):
                The target's output over the pending tokens of each row and its candidates.
        """


@dataclass(frozen=True)
class Draft:
    """
    What a drafter gave for a round.

    Args:
        candidates ([`Candidates`]): the candidates.
        num_forwards (`int`): the passes of the draft model that they took.
        rows (`frozenset[int]`): the rows for which these passes were made.
    """

    candidates: Candidates
    num_forwards: int = 0
    rows: frozenset[int] = frozenset()


def draft_block(drafter: Drafter | None, rows: Rows, most: int) -> Draft:
    """
    Candidates for the rows of the span, at most `most` for each and none where they would be of no use.

    Raises:
        `ValueError`: if the drafter gives something else than it was asked for.
    """
    # The last token of the budget needs no candidate: the target gives it anyway.
    room = [0 if request is None else min(request.num_remaining - 1, most) for request in rows.spanned]
    if drafter is None or max(room) <= 0:
        return Draft(Candidates.none(rows.num_spanned, rows.device))
    num_forwards = drafter.num_forwards
    candidates = _checked(drafter, drafter.draft(rows, torch.tensor(room)), room)
    num_forwards = drafter.num_forwards - num_forwards
    drafted_rows = frozenset(row for row, tokens in enumerate(room) if tokens > 0) if num_forwards > 0 else frozenset()
    return Draft(candidates, num_forwards, drafted_rows)


def _checked(drafter: Drafter, candidates: Candidates, max_tokens: list[int]) -> Candidates:
    """What a drafter gave, without columns that no row uses; `ValueError` if it is not what was asked for."""
    if len(candidates.token_ids) != len(max_tokens) or bool((candidates.lengths > torch.tensor(max_tokens)).any()):
        raise ValueError(
            f"`{type(drafter).__name__}.draft` has to give one block for each of {len(max_tokens)} rows, of at "
            f"most `max_tokens` candidates, but gave {len(candidates.token_ids)} of lengths {candidates.lengths}."
        )
    longest = int(candidates.lengths.max())
    probs = None if candidates.probs is None else candidates.probs[:, :longest]
    return Candidates(candidates.token_ids[:, :longest], candidates.lengths, probs)
