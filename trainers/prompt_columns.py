"""Columns: which columns of a data set hold prompts and references, and how a row is split into the two.

Knows nothing of data sets but the names of their columns.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from inspect import signature
from typing import Any

from hf_specgen.arguments import shown
from hf_specgen.serving import Prompt, are_messages, are_parts, text_of

# Usual names of columns, the first one found is read.
PROMPT_COLUMNS = ("prompt", "question")
COMPLETION_COLUMNS = ("completion", "answer")
MESSAGES_COLUMN, TEXT_COLUMN = "messages", "text"
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # what TRL's trainers tell the chat template, row by row


@dataclass(frozen=True)
class Columns:
    """Where in a data set the prompts and references are: in columns of their own, in conversations, or in texts."""

    prompt_column: str | None = None
    completion_column: str | None = None
    messages_column: str | None = None
    text_column: str | None = None
    split_marker: str | None = None

    @classmethod
    def of(cls, columns: Mapping[str, str | None]) -> "Columns":
        """Those that a caller names."""
        for name, value in columns.items():
            if value is not None and (not isinstance(value, str) or not value):
                raise TypeError(f"`{name}` has to be a text that is not empty, but is {value!r}.")
        return cls(**columns)

    def __post_init__(self) -> None:
        kinds = ("prompt_column", "completion_column"), ("messages_column",), ("text_column", "split_marker")
        given = [[name for name in kind if name in self.given()] for kind in kinds]
        if len(named := [names[0] for names in given if names]) > 1:
            raise ValueError(f"`{named[0]}` and `{named[1]}` are two ways to read a data set; give one of them.")
        if self.text_column is not None and self.split_marker is None:
            raise ValueError(
                "`text_column` needs `split_marker`, the text after which the reference begins, or the prompts would "
                "hold what is to be generated."
            )

    def given(self) -> list[str]:
        """The names of the settings that are not None."""
        return [name for name, value in asdict(self).items() if value is not None]

    def located(self, names: list[str]) -> "Columns":
        """With the usual names filled in, checked against the columns that there are."""
        found = self
        if self.split_marker is not None:
            found = replace(self, text_column=self.text_column or TEXT_COLUMN)
        elif self.messages_column is None:
            prompt = self.prompt_column or next((name for name in PROMPT_COLUMNS if name in names), None)
            if prompt is None and self.completion_column is None and MESSAGES_COLUMN in names:
                found = replace(self, messages_column=MESSAGES_COLUMN)
            elif prompt is None:
                raise ValueError(
                    f"No column of prompts was found: none of {[*PROMPT_COLUMNS, MESSAGES_COLUMN]} is among {names}. "
                    "Name it with `prompt_column`, `messages_column`, or `text_column` and `split_marker`."
                )
            else:
                usual = (name for name in COMPLETION_COLUMNS if name in names and name != prompt)
                found = replace(
                    self, prompt_column=prompt, completion_column=self.completion_column or next(usual, None)
                )
        for setting, name in found.columns().items():
            if name not in names:
                raise ValueError(f"`{setting}` has to be a column of the data set, but {name!r} is none of {names}.")
        return found

    def columns(self) -> dict[str, str]:
        """The columns to read, by the setting that names them."""
        return {name: value for name, value in asdict(self).items() if value is not None and name != "split_marker"}

    @property
    def has_references(self) -> bool:
        """Whether rows hold references."""
        return self.prompt_column is None or self.completion_column is not None

    def split(self, row: Mapping[str, Any], number: int) -> tuple[Prompt, Any]:
        """The prompt and the reference of a row, None where there is no reference."""
        for name in self.columns().values():
            if row.get(name) is None:
                raise ValueError(f"Row {number} has nothing in the column {name!r}.")
        if self.text_column is not None and self.split_marker is not None:
            return _split_text(row[self.text_column], self.split_marker, number)
        if self.messages_column is not None:
            return _split_messages(row[self.messages_column], number)
        assert self.prompt_column is not None, "it was located"
        reference = None if self.completion_column is None else row[self.completion_column]
        return _without_none(row[self.prompt_column]), text_of_reference(reference, number)


def check_known(names: Iterable[str], function: Callable[..., Any]) -> None:
    """Raises `TypeError`, with the nearest name, for what neither names a column nor an argument of `function`."""
    own = [each.name for each in signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD]
    known = own + [each.name for each in fields(Columns)]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"Did you mean `{near[0]}`?" if near else f"There are {known}."
            raise TypeError(f"`{name}` is an unknown argument. {hint}")


def _split_text(text: Any, marker: str, number: int) -> tuple[str, str]:
    if not isinstance(text, str):
        raise TypeError(f"Row {number} has to hold a text, but holds {text!r}.")
    before, found, after = text.partition(marker)
    if not found:
        raise ValueError(f"Row {number} has to hold the `split_marker` {marker!r}, but is {shown(text)}.")
    return before + marker, after


def _split_messages(messages: Any, number: int) -> tuple[list[dict[str, Any]], str]:
    if not are_messages(messages):
        raise TypeError(f"Row {number} has to hold a list of messages with roles, but holds {shown(messages)}.")
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or answers[-1] == 0:
        roles = [message["role"] for message in messages]
        raise ValueError(
            f"Row {number} has to hold an answer of the assistant after something else, but its roles are {roles}. "
            "Conversations without an answer are prompts: name the column with `prompt_column`."
        )
    answer = messages[answers[-1]]
    return _without_none(messages[: answers[-1]]), text_of(answer.get("content"), f"The answer of row {number}")


def text_of_reference(value: Any, number: int) -> Any:
    """The text of a reference that is a message, or the content of one in parts; others stay as they are."""
    where = f"The reference of row {number}"
    if are_parts(value):
        return text_of(value, where)
    if not are_messages(value):
        return value
    if len(value) > 1:
        raise ValueError(f"{where} has to be one message, but it has {len(value)}.")
    return text_of(value[0].get("content"), where)


def template_settings(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    """What a row tells the chat template besides the messages, in its columns `tools` and `chat_template_kwargs`."""
    tools, kwargs = (_without_none(row.get(name)) for name in TEMPLATE_COLUMNS)
    if isinstance(tools, str):  # schemas differ too much for a table, so they are often kept as JSON
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"Row {number} has to hold its `tools` as JSON, but holds {shown(tools)}.") from error
    if not isinstance(tools, list | None):
        raise TypeError(f"Row {number} has to hold a list of `tools`, but holds {shown(tools)}.")
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(f"Row {number} has to hold a dict of `chat_template_kwargs`, but holds {shown(kwargs)}.")
    return {name: value for name, value in zip(TEMPLATE_COLUMNS, (tools, kwargs)) if value}


def _without_none(value: Any) -> Any:
    """Without the keys that only other rows have, at any depth; tables fill them with None."""
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value
