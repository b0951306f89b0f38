"""DSpark: a block-parallel drafter that reads its target's hidden states (DeepSeek 2026, arXiv 2607.05147)."""

from .calibration import Calibration, ConfidenceRecorder
from .configuration import DSparkConfig
from .convert import convert
from .drafter import DSparkDrafter
from .modeling import DSparkModel
from .selfcheck import DSparkCheck, check_drafter

__all__ = [
    "Calibration",
    "ConfidenceRecorder",
    "DSparkCheck",
    "DSparkConfig",
    "DSparkDrafter",
    "DSparkModel",
    "check_drafter",
    "convert",
]
