"""Drafter: the contract of what proposes candidates for a round."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..layers.slot_cache import SlotCache
from .batch import Rows
from .verification import Candidates


def hidden_state_indices(layer_ids: Iterable[int]) -> list[int]:
    """Where the outputs of layers stand in `hidden_states`, whose first entry is the embedding output (layer -1)."""
    return [layer + 1 for layer in layer_ids]


class Drafter(ABC):
    """
    What proposes candidates for a round. Three methods are the whole contract; `bind` may refuse a target.

    Attributes:
        target_layer_ids (`tuple[int, ...]`): layers of the target whose output `observe` needs, counted from 0, -1
            for the embedding output; `hidden_state_indices` says where they stand in `outputs.hidden_states`.
        num_forwards (`int`): forward passes of the drafter so far.
        model (`PreTrainedModel`, *optional*): the causal language model that drafts, if there is one.
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
                The most candidates that each row can use, 0 where no request sits.
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


def checked_block(drafter: Drafter, candidates: Candidates, max_tokens: list[int]) -> Candidates:
    """What a drafter gave, without columns that no row uses; `ValueError` if it is not what was asked for."""
    if len(candidates.token_ids) != len(max_tokens) or bool((candidates.lengths > torch.tensor(max_tokens)).any()):
        raise ValueError(
            f"`{type(drafter).__name__}.draft` has to give one block for each of {len(max_tokens)} rows, of at "
            f"most `max_tokens` candidates, but gave {len(candidates.token_ids)} of lengths {candidates.lengths}."
        )
    longest = int(candidates.lengths.max())
    probs = None if candidates.probs is None else candidates.probs[:, :longest]
    return Candidates(candidates.token_ids[:, :longest], candidates.lengths, probs)
