"""What a user gives to any `generate`: penalties, bias and masks."""

from .bias_and_masks import LogitBias, UndecodableMask
from .token_penalties import FrequencyPenalty, PresencePenalty, RepetitionPenalty, TokenPenalties

__all__ = [
    "FrequencyPenalty",
    "LogitBias",
    "PresencePenalty",
    "RepetitionPenalty",
    "TokenPenalties",
    "UndecodableMask",
]
