"""Training and evaluation with transformers' Trainer: a callback that evaluates by generating text, and the trainer
for block drafters with its data. It is built on `hf_specgen`, which never imports from here.
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
