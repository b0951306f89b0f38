"""The first entry point: `model.generate(..., assistant_model=draft)` on our loop."""

from .enable import SpeculativeDecoderOnlyOutput, disable_speculation, enable_speculation, unwrap

__all__ = ["SpeculativeDecoderOnlyOutput", "disable_speculation", "enable_speculation", "unwrap"]
