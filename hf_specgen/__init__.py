"""Speculative and batched generation for Hugging Face Transformers, exact at any batch size."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from .serving import Completion, RequestError, SamplingParams, from_openai, get_generation_backend

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
    "RequestError",
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

ROOMS = ("logits_process", "layers", "engine", "drafters", "dspark", "generation", "serving")


def __getattr__(name: str) -> Any:
    """Loads the lowest room that exports the name, when it is first asked for: a command's help needs none of them."""
    if name in ROOMS:
        return import_module(f".{name}", __name__)
    if name in __all__:
        rooms = (import_module(f".{room}", __name__) for room in ROOMS)
        value = next(vars(room)[name] for room in rooms if name in room.__all__)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *ROOMS})
