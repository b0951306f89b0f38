"""Speculative and batched generation for Hugging Face Transformers, exact at any batch size."""

from .backends import get_generation_backend
from .completion import Completion
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
from .openai import from_openai
from .request import DecodingRules, Request
from .sampling_params import SamplingParams
from .seating import CacheLimits
from .stats import DecodingStats
from .verification import Candidates, Verification, verify

__version__ = "0.1.0"

__all__ = [
    "CacheLimits",
    "Candidates",
    "CausalLMDrafter",
    "Completion",
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
    "SamplingParams",
    "SpeculativeDecoderOnlyOutput",
    "StepCosts",
    "ThroughputScheduler",
    "TokenPenalties",
    "UndecodableMask",
    "Verification",
    "VerifyAll",
    "disable_speculation",
    "enable_speculation",
    "from_openai",
    "get_generation_backend",
    "order_logits_processors",
    "tune_linears",
    "verify",
]
