"""Prompts of JSON Lines: one object a line. The built-in set is such a file."""

import json
from collections.abc import Iterator
from pathlib import Path

from ..arguments import shown
from .prompt import FIELDS, Prompt, prompt_of_row


def read_file(path: str) -> Iterator[Prompt]:
    """
    The prompts of a file.

    Raises:
        `ValueError`: if the file cannot be read, or with the number of a line that holds no prompt.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"`source` has to be a readable text file, but {path!r} is not: {error}.") from error
    return parse(text, path)


def parse(text: str, source: str) -> Iterator[Prompt]:
    """The prompts of a text, which is called `source` in errors."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{source}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{place}: every line has to be one JSON object, but this is not JSON: {error}."
            ) from error
        if not isinstance(row, dict):
            raise ValueError(f"{place}: every line has to be a JSON object, but this is {shown(line.strip())}.")
        yield prompt_of_row(row, FIELDS, source, place)
