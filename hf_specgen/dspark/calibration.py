"""Calibration: what the confidence of a DSpark drafter is worth, measured on recorded rounds.

Sequential Temperature Scaling (DSpark, https://arxiv.org/abs/2607.05147): one temperature per position of the block,
such that the product of the probabilities up to a position says how often verification keeps everything up to it.
Knows tensors and a file, no models.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..engine.batch import Rows
from ..engine.verification import Candidates, Verification
from .checkpoint_files import read_json_object, write_text
from .reliability import auroc, brier_score, expected_calibration_error

CALIBRATION_FILE = "confidence_calibration.json"
METRICS: dict[str, Callable] = {"ece": expected_calibration_error, "auroc": auroc, "brier": brier_score}
GRID = tuple(2 ** (step / 40) for step in range(-80, 81))  # 0.25 to 4, with 1.0 in the middle
TIE = 1e-9  # errors that differ by less are rounding
MIN_RECORDS = 50  # at every position
MAX_ELEMENTS = 2**21  # probabilities held at once while the grid is searched


@dataclass(frozen=True)
class ConfidenceRecords:
    """
    What a drafter was confident of and what became of it, one record per verified block.

    Args:
        logits (`torch.FloatTensor` of shape `(records, block)`, on the CPU):
            The raw confidence logits.
        num_accepted (`torch.LongTensor` of shape `(records,)`):
            How many candidates verification kept.
        num_judged (`torch.LongTensor` of shape `(records,)`):
            At how many positions that says something; nothing is known behind an accepted stop id.
    """

    logits: Tensor
    num_accepted: Tensor
    num_judged: Tensor

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def labels(self) -> Tensor:  # (records, block)
        """Whether the candidate and all before it were kept."""
        return torch.arange(self.logits.shape[1]) < self.num_accepted[:, None]

    @property
    def is_judged(self) -> Tensor:  # (records, block)
        """Which candidates were judged: everything before them was kept."""
        return torch.arange(self.logits.shape[1]) < self.num_judged[:, None]

    def check_enough(self) -> None:
        """Raises `ValueError` if there are too few records to fit or to measure temperatures."""
        counts = self.is_judged.sum(dim=0).tolist()
        if min(counts) < MIN_RECORDS:
            raise ValueError(
                f"At least {MIN_RECORDS} records have to be judged at every position, but there are {counts}. Record "
                "more or longer texts."
            )

    @classmethod
    def concatenate(cls, parts: Sequence["ConfidenceRecords"]) -> "ConfidenceRecords":
        """The records of all parts; a ValueError if there are none."""
        if not parts:
            raise ValueError(
                "No round was recorded in which a whole block was verified. Verify whole blocks with a drafter that "
                "has a confidence head, and allow more new tokens than a block has candidates."
            )
        return cls(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)))


class HasConfidence(Protocol):
    """A drafter that keeps the raw logits of its last block, of shape `(rows, k)`; None if it drafted nothing."""

    confidence_logits: Tensor | None
    num_assistant_tokens: int  # k is less where all rows near the end of their budgets


class ConfidenceRecorder:
    """
    Collects a record of every row whose whole block was verified. To be given to [`Decoder`] as `on_round`.

    The drafter has to propose whole blocks whatever its confidence: if it shortened blocks, the records would
    be those of confident blocks only.

    Args:
        drafter ([`DSparkDrafter`]):
            The drafter of the same decoder.

    Attributes:
        parts (`list[ConfidenceRecords]`): what was recorded, by round.
    """

    def __init__(self, drafter: HasConfidence):
        self.drafter = drafter
        self.parts: list[ConfidenceRecords] = []

    def __call__(self, rows: Rows, candidates: Candidates, verification: Verification) -> None:
        logits, block_size = self.drafter.confidence_logits, self.drafter.num_assistant_tokens
        whole = [(row, request) for row, request in rows.live() if int(candidates.lengths[row]) == block_size]
        if not whole or logits is None:  # in a prefill, say, the logits are those of an earlier round
            return
        counts = torch.stack([verification.num_accepted, verification.num_possible], dim=1).int()
        bits = logits.float().view(torch.int32)  # so that everything travels exactly and in one copy
        table = torch.cat([bits, candidates.token_ids.int(), counts], dim=1).cpu()
        kept, accepted, judged = [], [], []
        for row, request in whole:
            *token_ids, num_accepted, num_possible = table[row, block_size:].tolist()
            if num_accepted < num_possible:
                stops = (i for i, token_id in enumerate(token_ids) if token_id in request.rules.eos_token_ids)
                end = next(stops, block_size) + 1  # nothing counts from here on if verification came here
                kept.append(row)
                accepted.append(min(num_accepted, end))
                judged.append(end if num_accepted >= end else block_size)
        if kept:
            kept_logits = table[kept, :block_size].view(torch.float32)
            self.parts.append(ConfidenceRecords(kept_logits, torch.tensor(accepted), torch.tensor(judged)))

    def records(self) -> ConfidenceRecords:
        """All records so far; a ValueError if there are none."""
        return ConfidenceRecords.concatenate(self.parts)


def fit_temperatures(records: ConfidenceRecords, grid: Sequence[float] | None = None) -> list[float]:
    r"""
    Fit one temperature per position, in order, by Sequential Temperature Scaling: with the temperatures before it
    fixed, that of a position minimises the calibration error of the probability that everything up to there is kept.

    Args:
        records ([`ConfidenceRecords`]):
            At least 50 of them judged at every position.
        grid (`Sequence[float]`, *optional*):
            The temperatures to try, 1.0 among them. 161 from 0.25 to 4 by default, evenly spaced in the logarithm. Of
            equally good ones the closest to 1 is taken.

    Raises:
        `ValueError`: if there are too few records, or the grid lacks 1.0 or holds numbers that are not positive.
    """
    records.check_enough()
    tried = torch.tensor(GRID if grid is None else grid, dtype=torch.float64)
    if not bool((tried > 0).all() & tried.isfinite().all() & (tried == 1).any()):
        raise ValueError(f"`grid` has to hold positive numbers and 1.0 among them, but is {grid!r}.")
    tried = tried[tried.log().abs().argsort(stable=True)]
    survival = torch.ones(len(records), dtype=torch.float64)
    temperatures = []
    for logits, labels, is_judged in zip(records.logits.double().T, records.labels.T, records.is_judged.T):
        before, judged_logits, judged_labels = survival[is_judged], logits[is_judged], labels[is_judged]
        errors = torch.cat(
            [
                expected_calibration_error(before * (judged_logits / part[:, None]).sigmoid(), judged_labels)
                for part in tried.split(max(1, MAX_ELEMENTS // len(before)))
            ]
        )
        best = tried[(errors <= errors.min() + TIE).long().argmax()]
        survival = survival * (logits / best).sigmoid()
        temperatures.append(float(best))
    return temperatures


@dataclass(frozen=True)
class Calibration:
    """
    Temperatures of a drafter's confidence and how good they are.

    Args:
        temperatures (`tuple[float, ...]`):
            One per position of the block.
        dataset (`str`), num_samples (`int`), decoding (`dict`):
            Where the fitted records come from, how many there were, and the settings that they were made under: with
            other settings, other shares of the candidates are kept.
        ece_before, ece_after, auroc_before, auroc_after, brier_before, brier_after (`tuple`):
            By position, how good the probability is that everything up to there is kept, without and with the
            temperatures. An AUROC is None where all labels were equal.

    Raises:
        `ValueError`: if the temperatures are not positive numbers, or a metric has not one number per position.
    """

    temperatures: tuple[float, ...]
    dataset: str = ""
    num_samples: int = 0
    decoding: dict[str, Any] = field(default_factory=dict)
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    auroc_before: tuple[float | None, ...] = ()
    auroc_after: tuple[float | None, ...] = ()
    brier_before: tuple[float, ...] = ()
    brier_after: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not _are_numbers(self.temperatures) or not self.temperatures or min(self.temperatures) <= 0:
            raise ValueError(f"`temperatures` have to be positive finite numbers, but are {self.temperatures!r}.")
        for name in (f"{metric}_{time}" for metric in METRICS for time in ("before", "after")):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not _are_numbers([value for value in values if value is not None]):
                raise ValueError(f"`{name}` has to hold finite numbers, but is {values!r}.")
            if len(values) not in (0, len(self.temperatures)):
                raise ValueError(f"`{name}` has to hold {len(self.temperatures)} numbers, but holds {len(values)}.")

    def probabilities(self, confidence_logits: Tensor) -> Tensor:
        """
        How likely each candidate is kept if those before it are, in fp32.

        Args:
            confidence_logits (`torch.FloatTensor` of shape `(..., positions)`):
                Raw logits of a block's first positions, on any device, which is not waited for.
        """
        num_positions = confidence_logits.shape[-1]
        assert num_positions <= len(self.temperatures), "the block size was checked"
        temperatures = torch.tensor(self.temperatures[:num_positions], dtype=torch.float32)
        return (confidence_logits.float() / temperatures.to(confidence_logits.device, non_blocking=True)).sigmoid()

    def check_block_size(self, num_candidates: int) -> None:
        """Raises a ValueError if the drafter's blocks have another size than those that were fitted."""
        if num_candidates != len(self.temperatures):
            raise ValueError(
                f"The calibration was fitted for blocks of {len(self.temperatures)} candidates, but the drafter "
                f"proposes {num_candidates}; refit with scripts/calibrate_dspark.py after removing the old file."
            )

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes `confidence_calibration.json` into `folder` and returns its path."""
        path = Path(folder) / CALIBRATION_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")
        return path

    @classmethod
    def load(cls, file_or_folder: str | os.PathLike[str]) -> "Calibration":
        """
        Reads a file, or that of a folder; one with the keys of SGLang only will do, and foreign keys are ignored.

        Raises:
            `ValueError`: if the file cannot be read or does not hold a calibration.
        """
        path = Path(file_or_folder)
        path = path / CALIBRATION_FILE if path.is_dir() else path
        values = read_json_object(path)
        if not isinstance(values.get("temperatures"), list):
            raise ValueError(f"`{path}` has to hold a JSON object with a list `temperatures`, but does not.")
        known: dict[str, Any] = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        try:
            return cls(**known)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`{path}` holds no usable calibration: {error}") from error


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(type(value) in (int, float) and abs(value) < float("inf") for value in values)  # no NaN, no bool


def by_position(
    metric: Callable[[Tensor, Tensor], Any], records: ConfidenceRecords, temperatures: Sequence[float]
) -> list[Any]:
    """
    Per position, `metric(probabilities, labels)` of the records judged there. The probabilities are those of keeping
    everything up to the position: running products of `sigmoid(logits / temperatures)`, in fp64.
    """
    conditional = (records.logits.double() / torch.tensor(temperatures, dtype=torch.float64)).sigmoid()
    columns = zip(conditional.cumprod(dim=-1).T, records.labels.T, records.is_judged.T)
    return [metric(probabilities[known], labels[known]) for probabilities, labels, known in columns]


def calibrate(
    fit_records: ConfidenceRecords, held_out_records: ConfidenceRecords, dataset: str, decoding: dict[str, Any]
) -> Calibration:
    """
    Fits temperatures to some records and measures them on others. On the records that were fitted the error would
    look smaller than it is, so the two should come from different prompts.

    Args:
        fit_records, held_out_records ([`ConfidenceRecords`]):
            At least 50 each, judged at every position.
        dataset (`str`), decoding (`dict`):
            Where the records come from, for the file.

    Raises:
        `ValueError`: if there are too few records.
    """
    held_out_records.check_enough()
    fitted = tuple(fit_temperatures(fit_records))
    raw = (1.0,) * len(fitted)
    measured: dict[str, Any] = {}
    for name, metric in METRICS.items():
        for time, temperatures in (("before", raw), ("after", fitted)):
            values = by_position(metric, held_out_records, temperatures)
            measured[f"{name}_{time}"] = tuple(None if value is None else float(value) for value in values)
    return Calibration(fitted, dataset, len(fit_records), decoding, **measured)
