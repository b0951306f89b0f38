"""Prompt: what a user says to a model, read from a row of any source; text until `encode_prompt` makes ids of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..arguments import shown

FIELDS = ("turns", "prompt")  # the first one found in a row is read


@dataclass(frozen=True)
class Prompt:
    """
    What a user says to a model.

    Args:
        category (`str`): The kind of task, such as "chat"; the name of the source where the source has no kinds.
        turns (`tuple[str, ...]`): The user's messages in order, usually one.
    """

    category: str
    turns: tuple[str, ...]


def prompt_of_row(row: Mapping[str, Any], fields: Sequence[str], source: str, place: str) -> Prompt:
    """
    The prompt of a row.

    Args:
        row (`Mapping[str, Any]`): The row.
        fields (`Sequence[str]`): The names of fields; the first one that is there is read.
        source (`str`): The category where the row has none.
        place (`str`): Where the row is, for errors.

    Raises:
        `ValueError`: if the row has no usable text.
    """
    field = next((field for field in fields if field in row), None)
    if field is None:
        needed = " or ".join(f"`{name}`" for name in fields)
        raise ValueError(f"{place}: a field {needed} is needed, but there are only {sorted(row)}.")
    value = row[field]
    turns = [value] if isinstance(value, str) else value
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{place}: `{field}` has to be a text or a list of texts, none empty, but is {shown(value)}.")
    return Prompt(category=str(row.get("category") or source), turns=tuple(turns))


def encode_prompt(tokenizer: PreTrainedTokenizerBase, turns: tuple[str, ...]) -> list[int]:
    """
    The ids of the first turn, in the tokenizer's chat template if it has one; without thinking, where a template knows
    that, since drafters are trained so.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The model's own.
        turns (`tuple[str, ...]`): As in [`Prompt`]; the first is encoded.

    Raises:
        `ValueError`: if the tokenizer makes no ids of it.
    """
    if tokenizer.chat_template is None:
        ids = tokenizer(turns[0])["input_ids"]
    else:
        messages = [{"role": "user", "content": turns[0]}]
        settings = {"add_generation_prompt": True, "return_dict": True, "enable_thinking": False}
        ids = tokenizer.apply_chat_template(messages, **settings)["input_ids"]
    if not ids:
        raise ValueError(f"The tokenizer makes no ids of {turns[0][:40]!r}: is it the model's own?")
    return ids
