"""What proposes candidates, and how many of them are verified."""

from .causal_lm import CausalLMDrafter
from .lookup import PromptLookupDrafter
from .step_costs import StepCosts, profile_step_costs, time_now
from .widths import ConfidenceThreshold, ThroughputScheduler, VerifyAll

__all__ = [
    "CausalLMDrafter",
    "ConfidenceThreshold",
    "PromptLookupDrafter",
    "StepCosts",
    "ThroughputScheduler",
    "VerifyAll",
    "profile_step_costs",
    "time_now",
]
