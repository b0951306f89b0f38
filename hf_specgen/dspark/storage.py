"""Files beside a drafter's tensors: config.json in its layout, the confidence threshold, the calibration."""

import json
import os
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from .calibration import CALIBRATION_FILE, Calibration


def load_generation_settings(folder: str | os.PathLike, hub_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The contents of a checkpoint's generation_config.json, nothing if there is none."""
    path = _found(folder, GENERATION_CONFIG_NAME, hub_kwargs)
    if path is None:
        return {}
    try:
        contents = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"`{path}` has to be a readable JSON file, but is not: {error}.") from error
    if not isinstance(contents, dict):
        raise ValueError(f"`{path}` has to hold a JSON object, but holds {contents!r}.")
    return contents


def check_threshold(threshold: float) -> float:
    """Returns the threshold, or raises `ValueError` if it is no probability."""
    is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if not is_number or not 0 <= threshold <= 1:
        raise ValueError(f"`assistant_confidence_threshold` has to be in [0, 1], but is {threshold!r}.")
    return float(threshold)


def load_calibration(folder: str | os.PathLike, hub_kwargs: dict[str, Any]) -> Calibration | None:
    """The calibration beside a checkpoint, None if there is none."""
    path = _found(folder, CALIBRATION_FILE, hub_kwargs)
    return None if path is None else Calibration.load(path)


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
    folder: str | os.PathLike,
    config: dict[str, Any],
    generation_settings: dict[str, Any],
    calibration: Calibration | None,
) -> None:
    """Writes config.json as its layout wants it, and generation settings and calibration where they are set."""
    Path(folder, "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
    for name in (GENERATION_CONFIG_NAME, CALIBRATION_FILE):  # those of an earlier save would be read again
        Path(folder, name).unlink(missing_ok=True)
    if generation_settings:
        GenerationConfig(**generation_settings).save_pretrained(folder)
    if calibration is not None:
        calibration.save(folder)
