"""DSpark: a block-parallel drafter that reads its target's hidden states (DeepSeek 2026, arXiv 2607.05147)."""

from .calibration import MIN_RECORDS, Calibration, ConfidenceRecorder, ConfidenceRecords, calibrate
from .configuration import DSparkConfig
from .convert import convert
from .drafter import DSparkDrafter
from .layouts import is_drafter
from .modeling import DSparkModel
from .reliability_plot import plot_reliability
from .selfcheck import DSparkCheck, check_drafter

__all__ = [
    "MIN_RECORDS",
    "Calibration",
    "ConfidenceRecorder",
    "ConfidenceRecords",
    "DSparkCheck",
    "DSparkConfig",
    "DSparkDrafter",
    "DSparkModel",
    "calibrate",
    "check_drafter",
    "convert",
    "is_drafter",
    "plot_reliability",
]
