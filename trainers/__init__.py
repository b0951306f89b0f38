"""Evaluation by generation while transformers' Trainer, or one built on it, trains: a callback and its parts.

Built on `hf_specgen`, which never imports from here; only its commands do.
"""

from .eval_generation import EvalGeneration, GeneratedTexts
from .eval_prompts import EvalPrompts
from .generation_callback import GenerationEvalCallback
from .metrics import EvalMetric, resolve_metrics
from .preservation import preserved

__all__ = [
    "EvalGeneration",
    "EvalMetric",
    "EvalPrompts",
    "GeneratedTexts",
    "GenerationEvalCallback",
    "preserved",
    "resolve_metrics",
]
