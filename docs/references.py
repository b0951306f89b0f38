"""Docstrings in transformers' format as Markdown for the reference pages: sections become lists, names links."""

import re
from pathlib import Path
from typing import Any

import griffe

PAGES = Path(__file__).parent / "api"
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example):$")
# `[`Decoder`]` and `[`~transformers.Trainer`]`, but no Markdown link.
NAME = re.compile(r"\[`(~?)([\w.]+)`\](?![\[(])")
# `frequency_penalty, presence_penalty (` and `top_k (`: what an entry documents.
DOCUMENTED = re.compile(r"\b[a-z]\w*(?:, [a-z]\w*)*(?= \()")
FOREIGN = ("transformers.", "datasets.", "torch.", "evaluate.", "peft.")


class References(griffe.Extension):
    """A name in brackets links to its place on the reference pages; one that is on none of them fails the build."""

    def __init__(self) -> None:
        super().__init__()
        listed = (line for page in PAGES.glob("*.md") for line in page.read_text().splitlines())
        paths = [line.removeprefix("::: ") for line in listed if line.startswith("::: ")]
        self.paths = {path.rpartition(".")[2]: path for path in paths}

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = NAME.sub(self._link, as_markdown(obj.docstring.value))

    def _link(self, match: re.Match) -> str:
        is_short, name = match.groups()
        shown = name.rpartition(".")[2] if is_short else name
        if name.startswith(FOREIGN):
            return f"`{shown}`"
        first, dot, rest = name.partition(".")
        return f"[`{shown}`][{self.paths.get(first, first)}{dot}{rest}]"


def as_markdown(docstring: str) -> str:
    """Sections as a bold word and a list with an item for each entry."""
    lines: list[str] = []
    section = None
    for line in docstring.splitlines():
        if match := SECTION.match(line):
            section = match[1]
            lines += ["", f"**{section}**", ""]
        elif section is None or not line.strip():
            lines.append(line)
        elif not line.startswith("    "):
            section = None
            lines += ["", line]
        else:
            lines.append(_entry(section, line[4:], lines[-1]))
    return "\n".join(lines)


def _entry(section: str, line: str, before: str) -> str:
    """A line of a section: the first of an entry becomes an item, the others stay in it."""
    if section in ("Returns", "Yields", "Example"):
        return line
    if line.startswith(" "):
        begins_list = line.lstrip().startswith("- ") and not before.lstrip().startswith("- ")
        return f"\n{line}" if begins_list else line
    if section == "Raises":
        return f"-   {line}" if line.startswith(("`", "[")) else f"    {line}"
    head, colon, rest = line.partition("):")
    return f"-   {DOCUMENTED.sub(_as_code, head)}{colon}{rest}"


def _as_code(match: re.Match) -> str:
    return ", ".join(f"**`{name}`**" for name in match[0].split(", "))
