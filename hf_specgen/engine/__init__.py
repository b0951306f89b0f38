"""The one decoding loop, over token ids only: requests, their batch and caches, scheduling, scoring, verification."""

from .batch import Rows, forward
from .decoder import Decoder
from .drafter import Drafter
from .model_facts import eos_ids
from .request import MAX_SEED, DecodingRules, Request, TokenLogprobs
from .scheduler import CacheLimits
from .selfcheck import self_check
from .stats import DecodingStats, RoundTrace
from .verification import Candidates, Verification, verify

__all__ = [
    "CacheLimits",
    "Candidates",
    "Decoder",
    "DecodingRules",
    "DecodingStats",
    "Drafter",
    "MAX_SEED",
    "Request",
    "RoundTrace",
    "Rows",
    "TokenLogprobs",
    "Verification",
    "eos_ids",
    "forward",
    "self_check",
    "verify",
]
