"""Speculative and batched generation for Hugging Face Transformers, exact at any batch size."""

from .cpu_linear import tune_linears
from .decoder import Decoder
from .draft_length import ConfidenceThreshold, StepCosts, ThroughputScheduler, VerifyAll
from .drafting import CausalLMDrafter, Drafter, PromptLookupDrafter
from .dspark import DSparkConfig, DSparkDrafter, DSparkModel
from .generation import SpeculativeDecoderOnlyOutput, disable_speculation, enable_speculation
from .logits_process import (
    FrequencyPenalty,
    LogitBias,
    PresencePenalty,
    RepetitionPenalty,
    TokenPenalties,
    UndecodableMask,
    order_logits_processors,
)
from .request import DecodingRules, Request
from .seating import CacheLimits
from .stats import DecodingStats
from .verification import Candidates, Verification, verify

__version__ = "0.1.0"

__all__ = [
    "CacheLimits",
    "Candidates",
    "CausalLMDrafter",
    "ConfidenceThreshold",
    "DSparkConfig",
    "DSparkDrafter",
    "DSparkModel",
    "Decoder",
    "DecodingRules",
    "DecodingStats",
    "Drafter",
    "FrequencyPenalty",
    "LogitBias",
    "PresencePenalty",
    "PromptLookupDrafter",
    "RepetitionPenalty",
    "Request",
    "SpeculativeDecoderOnlyOutput",
    "StepCosts",
    "ThroughputScheduler",
    "TokenPenalties",
    "UndecodableMask",
    "Verification",
    "VerifyAll",
    "disable_speculation",
    "enable_speculation",
    "order_logits_processors",
    "tune_linears",
    "verify",
]
