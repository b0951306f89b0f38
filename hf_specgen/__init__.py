"""Speculative and batched generation for Hugging Face Transformers, exact at any batch size."""

from .drafters import CausalLMDrafter, PromptLookupDrafter, StepCosts, ThroughputScheduler
from .dspark import DSparkConfig, DSparkDrafter, DSparkModel
from .engine import CacheLimits, Candidates, Decoder, DecodingRules, DecodingStats, Drafter, Request
from .generation import disable_speculation, enable_speculation
from .layers import tune_linears
from .logits_process import (
    FrequencyPenalty,
    LogitBias,
    PresencePenalty,
    RepetitionPenalty,
    TokenPenalties,
    UndecodableMask,
)
from .serving import Completion, SamplingParams, from_openai, get_generation_backend

__version__ = "0.1.0"

__all__ = [
    "CacheLimits",
    "Candidates",
    "CausalLMDrafter",
    "Completion",
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
    "StepCosts",
    "ThroughputScheduler",
    "TokenPenalties",
    "UndecodableMask",
    "disable_speculation",
    "enable_speculation",
    "from_openai",
    "get_generation_backend",
    "tune_linears",
]
