"""DecodingRules: how the tokens of requests are chosen, and what ends them. Settings only: nothing here changes."""

from collections.abc import Set
from dataclasses import dataclass, field
from functools import cached_property

from transformers import (
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..arguments import checked_integer

KNOWN_CRITERIA = (MaxTimeCriteria, StopStringCriteria)  # they say the same of a token whenever they are asked


@dataclass(frozen=True)
class DecodingRules:
    """
    How the tokens of a request are chosen and what ends it, its budget apart.

    Args:
        logits_processor (`LogitsProcessorList`, *optional*):
            Processors and warpers, applied in this order.
        stopping_criteria (`StoppingCriteriaList`, *optional*):
            Criteria other than length and eos.
        eos_token_ids (`frozenset[int]`, *optional*):
            Ids that end the row.
        do_sample (`bool`, *optional*, defaults to `False`):
            Whether to sample; otherwise the best token is taken.

    Raises:
        `TypeError`: if a value is of another kind.
    """

    logits_processor: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    stopping_criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    eos_token_ids: frozenset[int] = frozenset()
    do_sample: bool = False

    def __post_init__(self) -> None:
        for name in ("logits_processor", "stopping_criteria"):
            entries = getattr(self, name)
            if not isinstance(entries, list) or not all(callable(entry) for entry in entries):
                raise TypeError(f"`{name}` has to be a list of callables, but is {entries!r}.")
        if not isinstance(self.eos_token_ids, Set):
            raise TypeError(f"`eos_token_ids` has to be a set of ints, but is {self.eos_token_ids!r}.")
        ids = frozenset(checked_integer("eos_token_ids", token_id) for token_id in self.eos_token_ids)
        object.__setattr__(self, "eos_token_ids", ids)
        if not isinstance(self.do_sample, bool):
            raise TypeError(f"`do_sample` has to be a bool, but is {self.do_sample!r}.")

    @cached_property
    def unknown_criteria(self) -> list[StoppingCriteria]:
        """Stopping criteria of which nothing is known, so that they may remember what they are called with."""
        return [criterion for criterion in self.stopping_criteria if type(criterion) not in KNOWN_CRITERIA]
