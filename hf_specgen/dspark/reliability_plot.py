"""The reliability diagram of a calibration, drawn with matplotlib."""

import math
import os
from importlib import import_module
from typing import Any

from torch import Tensor

from .calibration import Calibration, ConfidenceRecords, by_position
from .reliability import expected_calibration_error, reliability_bins

MAX_PANELS_PER_LINE = 4
SMALLEST_AREA, LARGEST_AREA = 5, 400  # of a dot, in square points
BEFORE_COLOR, AFTER_COLOR = "#d1701f", "#1f5fa8"


def plot_reliability(records: ConfidenceRecords, calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """
    Draws a reliability diagram, one panel per position: the share of blocks kept up to there over the probability
    predicted, without and with the calibration. The area of a dot says how many blocks fall in its bin.

    Args:
        records ([`ConfidenceRecords`]):
            What to draw; others than those that were fitted.
        calibration ([`Calibration`]):
            What to judge.
        path (`str` or `os.PathLike`):
            The picture to write; its ending says the format.

    Raises:
        `ImportError`: if matplotlib is not installed.
        `ValueError`: if the blocks of the records have another size than those of the calibration.
    """
    try:
        figure_class = import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ImportError("A reliability diagram needs matplotlib: `pip install matplotlib`.") from error
    num_positions = records.logits.shape[1]
    calibration.check_block_size(num_positions)
    lines = math.ceil(num_positions / MAX_PANELS_PER_LINE)
    columns = math.ceil(num_positions / lines)
    figure = figure_class(figsize=(max(2.4 * columns, 4.8), 2.6 * lines + 0.9), layout="constrained")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for panel in panels[num_positions:]:
        panel.set_visible(False)
    for name, color, temperatures in (
        ("before", BEFORE_COLOR, (1.0,) * num_positions),
        ("after", AFTER_COLOR, calibration.temperatures),
    ):
        for panel, bins in zip(panels, by_position(reliability_bins, records, temperatures)):
            _draw(panel, bins, name, color)
    before = by_position(expected_calibration_error, records, (1.0,) * num_positions)
    after = by_position(expected_calibration_error, records, calibration.temperatures)
    for position, panel in enumerate(panels[:num_positions]):
        panel.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle="--", zorder=0)
        panel.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), aspect="equal", xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
        panel.set_title(f"position {position + 1}\nECE {before[position]:.1%} → {after[position]:.1%}", fontsize=9)
        if position + columns >= num_positions:  # the lowest panel of its column
            panel.tick_params(labelbottom=True)
    figure.supxlabel("predicted probability of keeping all candidates up to here", fontsize=10)
    figure.supylabel("share kept", fontsize=10)
    key = figure.legend(
        *panels[0].get_legend_handles_labels(),
        title="area of a dot: number of blocks in the bin",
        loc="outside upper center",
        ncols=2,
        frameon=False,
        fontsize=9,
        title_fontsize=9,
    )
    for dot in key.legend_handles:
        dot.set_sizes([40])
    figure.savefig(path, dpi=150)


def _draw(panel: Any, bins: Tensor, name: str, color: str) -> None:  # bins (3, bins)
    counts, predicted, observed = bins[:, bins[0] > 0]
    x, y = (predicted / counts).tolist(), (observed / counts).tolist()
    areas = (SMALLEST_AREA + LARGEST_AREA * counts / counts.sum()).tolist()
    panel.scatter(x, y, s=areas, color=color, alpha=0.75, linewidths=0, label=f"{name} calibration", zorder=2)
