"""The one decoding loop, over token ids only: requests, their batch and caches, scheduling, scoring, verification."""

from .batch import Rows
from .decoder import Decoder
from .drafter import Drafter
from .request import MAX_SEED, DecodingRules, Request, TokenLogprobs
from .scheduler import CacheLimits
from .selfcheck import self_check
from .stats import DecodingStats, RoundTrace
from .verification import Candidates, Verification, verify

__all__ = [
    "MAX_SEED",
    "CacheLimits",
    "Candidates",
    "Decoder",
    "DecodingRules",
    "DecodingStats",
    "Drafter",
    "Request",
    "RoundTrace",
    "Rows",
    "TokenLogprobs",
    "Verification",
    "self_check",
    "verify",
]
