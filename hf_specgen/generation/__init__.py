"""Entry point one: `model.generate(..., assistant_model=draft)` on our loop."""

from .choice import SpeculationSettings, make_drafter
from .enable import SpeculativeDecoderOnlyOutput, disable_speculation, enable_speculation
from .wrappers import unwrap

__all__ = [
    "SpeculationSettings",
    "SpeculativeDecoderOnlyOutput",
    "disable_speculation",
    "enable_speculation",
    "make_drafter",
    "unwrap",
]
