"""Files beside a drafter's tensors: config.json in its layout, the confidence threshold, the calibration."""

import json
import os
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from .calibration import CALIBRATION_FILE, Calibration


def load_threshold(folder: str | os.PathLike, hub_kwargs: dict[str, Any]) -> float:
    """The `assistant_confidence_threshold` of a checkpoint's generation config, 0 if there is none."""
    path = _found(folder, GENERATION_CONFIG_NAME, hub_kwargs)
    if path is None:
        return 0.0
    try:
        contents = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"`{path}` has to be a readable JSON file, but is not: {error}.") from error
    if not isinstance(contents, dict):
        raise ValueError(f"`{path}` has to hold a JSON object, but holds {contents!r}.")
    return check_threshold(contents.get("assistant_confidence_threshold") or 0.0)


def check_threshold(threshold: float) -> float:
    """Returns the threshold, or raises `ValueError` if it is no probability."""
    is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if not is_number or not 0 <= threshold <= 1:
        raise ValueError(f"`assistant_confidence_threshold` has to be in [0, 1], but is {threshold!r}.")
    return float(threshold)


def load_calibration(folder: str | os.PathLike, num_candidates: int, hub_kwargs: dict[str, Any]) -> Calibration | None:
    """The calibration beside a checkpoint, None if there is none; `ValueError` if it is for other blocks."""
    path = _found(folder, CALIBRATION_FILE, hub_kwargs)
    if path is None:
        return None
    calibration = Calibration.load(path)
    calibration.check_block_size(num_candidates)
    return calibration


def _found(folder: str | os.PathLike, name: str, hub_kwargs: dict[str, Any]) -> str | None:
    return cached_file(
        folder,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
        **hub_kwargs,
    )


def rewrite_saved(
    folder: str | os.PathLike, config: dict[str, Any], threshold: float, calibration: Calibration | None
) -> None:
    """Writes config.json as its layout wants it, and threshold and calibration where they are set."""
    Path(folder, "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
    for name in (GENERATION_CONFIG_NAME, CALIBRATION_FILE):  # those of an earlier save would be read again
        Path(folder, name).unlink(missing_ok=True)
    if threshold > 0:
        GenerationConfig(assistant_confidence_threshold=threshold).save_pretrained(folder)
    if calibration is not None:
        calibration.save(folder)
