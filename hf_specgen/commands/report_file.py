"""A command's results as a JSON file that is whole at any time: it is written anew whenever there is more."""

import json
import os
from pathlib import Path
from typing import Any


class ReportFile:
    """
    Args:
        path (`str`, *optional*): where to write. None writes nothing.
    """

    def __init__(self, path: str | None):
        self.path = None if path is None else Path(path).expanduser()

    def write(self, report: dict[str, Any]) -> None:
        """Puts the report into the place of the one before; whoever stops this process leaves one of the two."""
        if self.path is None:
            return
        text = json.dumps(report, indent=1) + "\n"
        if self.path.exists() and not self.path.is_file():  # a pipe or a device cannot be replaced
            self.path.write_text(text)
            return
        path = self.path.resolve()  # a link goes on leading there
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.write_text(text)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
