"""What proposes candidates, and how many of them are verified."""

from .causal_lm import CausalLMDrafter
from .lookup import PromptLookupDrafter
from .step_costs import StepCosts, profile_step_costs, time_now
from .widths import ConfidenceThreshold, DraftLengthPolicy, ThroughputScheduler, VerifyAll

__all__ = [
    "CausalLMDrafter",
    "ConfidenceThreshold",
    "DraftLengthPolicy",
    "PromptLookupDrafter",
    "StepCosts",
    "ThroughputScheduler",
    "VerifyAll",
    "profile_step_costs",
    "time_now",
]
