"""CompletionLog: where the texts of an evaluation can be read: a file, the terminal, and the trackers' tables.

What cannot be written does not end a training: it is said once, and the training goes on.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
        say_once (`Callable[[str, str], None]`):
            Takes a subject and a sentence about it: what could not be written.
    """

    def __init__(self, output_dir: Path, num_shown: int, say_once: Callable[[str, str], None]):
        self.output_dir = output_dir
        self.num_shown = num_shown
        self.say_once = say_once

    def check(self, references: Sequence[Any] | None) -> None:
        """
        Finds out before training what `save` would fail with, by writing the references into a file and removing it.

        Raises:
            `ValueError`: if nothing can be written there, or references are nothing that JSON can hold.
        """
        path = self.output_dir / f".check_{os.getpid()}"
        try:
            _write(path, [_line(reference) for reference in references or [None]])
            path.unlink()
        except OSError as error:
            raise ValueError(
                f"The texts cannot be saved in {str(self.output_dir)!r}: {error}. Give another `output_dir`."
            ) from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"`references` cannot be saved as JSON: {error}.") from error

    def save(self, name: str, step: int, completions: Sequence[Completion], references: Sequence[Any] | None) -> None:
        """
        Writes `<name>_step_<step>.jsonl`, a line for each text; a file of that name is replaced. There is the whole
        file or none: it is written beside and renamed.
        """
        path = self.output_dir / f"{name}_step_{step:08d}.jsonl"
        try:
            _write(path, [_line(_entry(step, text, references)) for text in completions])
        except (OSError, TypeError, ValueError) as error:
            self.say_once("file", f"The texts cannot be saved in {str(path)!r}: {error}. The training goes on.")

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
            [step, _encodable(text.prompt), _encodable(text.text)]
            + ([] if references is None else [_encodable(str(references[text.index]))])
            for text in completions[: self.num_shown]
        ]
        columns = COLUMNS[: len(rows[0])]
        self._show_in("the terminal", lambda: _print_table(f"{name}, step {step}", columns, rows))
        for callback in callbacks:
            key, kind = f"{name}/completions", type(callback).__name__
            self._show_in(f"`{kind}`", lambda: _track(callback, key, step, columns, rows))  # noqa: B023  # runs at once

    def _show_in(self, place: str, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self.say_once(place, f"The texts cannot be shown in {place}: {type(error).__name__}: {error}")


def _entry(step: int, text: Completion, references: Sequence[Any] | None) -> dict[str, Any]:
    entry = {
        "step": step,
        "index": text.index,
        "sample": text.sample,
        "prompt": text.prompt,
        "completion": text.text,
        "finish_reason": text.finish_reason,
        "num_tokens": len(text.token_ids),
    }
    if text.error is not None:
        entry["error"] = str(text.error)
    if references is not None:
        entry["reference"] = references[text.index]
    return entry


def _line(entry: Any) -> str:
    return json.dumps(entry, ensure_ascii=False, default=str) + "\n"


def _write(path: Path, lines: Sequence[str]) -> None:
    """Writes a whole file, or raises and leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    try:
        # What UTF-8 cannot hold, halves of surrogate pairs, gets the escape that it has in JSON too.
        with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(lines)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _encodable(text: str, encoding: str = "utf-8") -> str:
    """The text with escapes for what an encoding cannot hold."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


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
        import pandas as pd  # comes with trackio

        table = callback._trackio.Table(dataframe=pd.DataFrame(rows, columns=columns))
        callback._trackio.log({key: table, "train/global_step": step})


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    console = Console()
    table = Table(title=title, show_lines=True)
    for column in columns[1:]:
        table.add_column(column, overflow="fold")
    for row in rows:
        cells = [_encodable(_shortened(value), console.encoding) for value in row[1:]]
        table.add_row(*(cell.replace("[", r"\[") for cell in cells))  # else rich takes it for markup
    console.print(table)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        cells = [_shortened(value).replace("|", r"\|").replace("\n", "<br>") for value in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
