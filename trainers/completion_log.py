"""CompletionLog: where the texts of an evaluation can be read: a file, the terminal, and the trackers' tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from hf_specgen import Completion

COLUMNS = ("step", "prompt", "completion", "reference")
MAX_SHOWN = 400  # characters of a cell on the terminal and in TensorBoard


class CompletionLog:
    """
    Records the texts of evaluations; used on the main rank only.

    Args:
        output_dir (`Path`):
            Where the files go, one per evaluation.
        num_shown (`int`):
            How many of the first texts are printed and given to the trackers.
    """

    def __init__(self, output_dir: Path, num_shown: int):
        self.output_dir = output_dir
        self.num_shown = num_shown

    def save(self, name: str, step: int, completions: Sequence[Completion], references: Sequence[Any] | None) -> Path:
        """Writes `<name>_step_<step>.jsonl`, a line for each text; a file of that name is replaced."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        path = self.output_dir / f"{name}_step_{step:08d}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for text in completions:
                line = {
                    "step": step,
                    "index": text.index,
                    "sample": text.sample,
                    "prompt": text.prompt,
                    "completion": text.text,
                    "finish_reason": text.finish_reason,
                    "num_tokens": len(text.token_ids),
                }
                if text.error is not None:
                    line["error"] = str(text.error)
                if references is not None:
                    line["reference"] = references[text.index]
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        return path

    def show(
        self,
        name: str,
        step: int,
        completions: Sequence[Completion],
        references: Sequence[Any] | None,
        callbacks: Sequence[TrainerCallback],
    ) -> None:
        """Prints a table of the first texts, and gives it to those trackers that are among the callbacks."""
        if self.num_shown == 0:
            return
        rows = [
            [step, text.prompt, text.text, "" if references is None else str(references[text.index])]
            for text in completions[: self.num_shown]
        ]
        columns = [column for column in COLUMNS if column != "reference" or references is not None]
        rows = [row[: len(columns)] for row in rows]
        Console().print(_terminal_table(f"{name}, step {step}", columns, rows))
        for callback in callbacks:
            _track(callback, f"{name}/completions", step, columns, rows)


def _track(
    callback: TrainerCallback, key: str, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> None:
    """Gives a table to a tracker that has begun to record; does nothing for other callbacks."""
    if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
        callback.tb_writer.add_text(key, _markdown(columns, rows), step)
        callback.tb_writer.flush()
    elif isinstance(callback, WandbCallback) and callback._initialized:
        table = callback._wandb.Table(columns=list(columns), data=list(rows))
        callback._wandb.log({key: table, "train/global_step": step})
    elif isinstance(callback, TrackioCallback) and callback._initialized:
        table = callback._trackio.Table(dataframe=pd.DataFrame(rows, columns=columns))
        callback._trackio.log({key: table, "train/global_step": step})


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _terminal_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    table = Table(title=title, show_lines=True)
    for column in columns[1:]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_escaped(_shortened(value)) for value in row[1:]))
    return table


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")  # else rich takes it for markup


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        cells = [_shortened(value).replace("|", r"\|").replace("\n", "<br>") for value in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
