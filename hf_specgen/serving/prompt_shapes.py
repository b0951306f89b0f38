"""Prompts as lists, whatever holds them; what is no prompt is refused with its number and shape."""

from collections.abc import Iterable, Mapping, Set
from numbers import Integral
from typing import Any

from ..arguments import shown
from .request_error import RequestTypeError


def listed_prompts(prompts: Any) -> list[Any]:
    """The prompts of a call, of whatever kind the container is."""
    if isinstance(prompts, (str, bytes, Mapping, Set)) or not isinstance(prompts, Iterable):
        raise RequestTypeError(
            f"`prompts` has to be a list of prompts, but is {_shape(prompts)}. A single prompt stands in a list."
        )
    if hasattr(prompts, "columns") or hasattr(prompts, "column_names"):
        raise RequestTypeError(f"`prompts` has to be one column of a table, but is {_shape(prompts)}.")
    entries = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    if not isinstance(entries, list):
        raise RequestTypeError(f"`prompts` has to be a list of prompts, but is {_shape(prompts)}.")
    if entries and all(isinstance(entry, Integral) for entry in entries):
        raise RequestTypeError(
            f"`prompts` has to be a list of prompts, but is {_shape(prompts)}: one prompt of ids, which stands in a "
            "list."
        )
    if entries and all(isinstance(entry, Mapping) for entry in entries):
        raise RequestTypeError(
            f"`prompts` has to be a list of prompts, but is {_shape(prompts)}: one conversation, which stands in a "
            "list."
        )
    return entries


def entries_of(prompt: Any, index: int) -> list[Any]:
    """The ids or messages of a prompt."""
    if not isinstance(prompt, (bytes, bytearray, Mapping, Set)) and isinstance(prompt, Iterable):
        entries = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        if isinstance(entries, list) and all(isinstance(entry, Mapping) for entry in entries):
            return entries
        if isinstance(entries, list) and all(_is_id(entry) for entry in entries):
            return [int(entry) for entry in entries]
    raise RequestTypeError(
        f"Prompt {index} has to be a text, a list of ids, or a list of chat messages, but is {_shape(prompt)}.",
        param="prompt",
    )


def _is_id(entry: Any) -> bool:
    return isinstance(entry, Integral) and not isinstance(entry, bool)


def _shape(value: Any) -> str:
    """What a value looks like, for errors about its shape."""
    if hasattr(value, "shape"):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        kinds = sorted({type(entry).__name__ for entry in value})
        return f"a {type(value).__name__} of {len(value)} ({', '.join(kinds[:3])}): {shown(value)}"
    return f"{shown(value)} ({type(value).__name__})"
