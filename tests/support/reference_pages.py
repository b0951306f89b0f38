"""The names that the reference pages list."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def listed_paths() -> set[str]:
    """The dotted paths of all entries in docs/api."""
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    return set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
