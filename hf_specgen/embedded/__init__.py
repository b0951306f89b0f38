"""The default model, which needs no model hub."""

from .model import load_embedded_model

__all__ = ["load_embedded_model"]
