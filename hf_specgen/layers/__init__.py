"""What is put into or around a model's layers: the slot cache, grouped attention, faster linear products."""

from .attention import grouped_attention
from .linear import tune_linears
from .slot_cache import SlotCache

__all__ = ["SlotCache", "grouped_attention", "tune_linears"]
