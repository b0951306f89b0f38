"""The one decoding loop, over token ids only: requests, their batch and caches, scheduling, scoring, verification."""

from .batch import Rows, forward
from .decoder import Decoder
from .drafter import Drafter, hidden_state_indices
from .limits import CacheLimits
from .logprobs import TokenLogprobs
from .model_facts import eos_ids
from .noise import MAX_SEED
from .request import FinishReason, Request, RequestStatus
from .rules import DecodingRules
from .selfcheck import self_check
from .stats import DecodingStats, RoundTrace
from .verification import Candidates, Verification, verify
from .width import DraftLengthPolicy

__all__ = [
    "CacheLimits",
    "Candidates",
    "Decoder",
    "DecodingRules",
    "DecodingStats",
    "DraftLengthPolicy",
    "Drafter",
    "FinishReason",
    "MAX_SEED",
    "Request",
    "RequestStatus",
    "RoundTrace",
    "Rows",
    "TokenLogprobs",
    "Verification",
    "eos_ids",
    "forward",
    "self_check",
    "hidden_state_indices",
    "verify",
]
