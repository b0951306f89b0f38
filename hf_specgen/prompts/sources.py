"""Prompts to measure and to demonstrate with: the built-in set, JSONL files and data sets of the `datasets` library.

Knows nothing of models; a prompt is text until `encode_prompt` puts it into a chat template.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from datasets import DatasetDict, load_dataset
from datasets.exceptions import DatasetsError
from transformers import PreTrainedTokenizerBase

BUILTIN_NAME = "builtin"
BUILTIN_FILE = "builtin.jsonl"
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


def load_prompts(
    source: str = BUILTIN_NAME, categories: Sequence[str] | None = None, limit: int | None = None
) -> list[Prompt]:
    r"""
    Load prompts in the order of their source.

    Args:
        source (`str`, *optional*, defaults to `"builtin"`):
            `"builtin"` (ten each of chat, summarisation, code_editing and arithmetic, taking turns), the path of a
            `.jsonl` file, or a name for `datasets.load_dataset`, with a column after a colon where it is called
            neither `turns` nor `prompt`: `"openai/openai_humaneval:prompt"`. Of a data set with several splits,
            `test` is read where it exists, else the first one. A field holds one text or a list of them.
        categories (`Sequence[str]`, *optional*):
            Keep only these. All by default.
        limit (`int`, *optional*):
            Keep only the first `limit` prompts of those.

    Returns:
        `list[Prompt]`: at least one prompt.

    Raises:
        `ValueError`: if the source cannot be read, a row has no usable text, a category is unknown, or `limit` is
        below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` has to be at least 1, but is {limit!r}.")
    if isinstance(categories, str):
        raise ValueError(f"`categories` has to be a sequence of names, but is the string {categories!r}.")

    if source == BUILTIN_NAME:
        text = resources.files(__package__).joinpath(BUILTIN_FILE).read_text(encoding="utf-8")
        prompts = list(_parse_jsonl(text, source))
    elif source.endswith(".jsonl"):
        prompts = list(_parse_jsonl(_read_file(source), source))
    else:
        prompts = list(_read_dataset(source))
    if not prompts:
        raise ValueError(f"`source` has to hold at least one prompt, but {source!r} is empty.")

    if categories is not None:
        known = sorted({prompt.category for prompt in prompts})
        unknown = sorted(set(categories).difference(known))
        if unknown or not categories:
            raise ValueError(f"`categories` has to name some of {known}, but is {list(categories)}.")
        prompts = [prompt for prompt in prompts if prompt.category in categories]
    return prompts[:limit]


def _read_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"`source` has to be a readable text file, but {path!r} is not: {error}.") from error


def _parse_jsonl(text: str, source: str) -> Iterator[Prompt]:
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
            raise ValueError(f"{place}: every line has to be a JSON object, but this is {line.strip()[:60]!r}.")
        yield _to_prompt(row, FIELDS, source, place)


def _read_dataset(source: str) -> Iterator[Prompt]:
    name, _, column = source.partition(":")
    path, config = name, None
    if name.count("/") == 2 and not Path(name).exists():  # owner/name/config on the hub
        path, _, config = name.rpartition("/")
    try:
        dataset = load_dataset(path, config)
    except (OSError, ValueError, DatasetsError) as error:
        raise ValueError(
            f"`source` has to be {BUILTIN_NAME!r}, the path of a .jsonl file, or the name of a data set that "
            f"`datasets` can load, but is {source!r}: {error}"
        ) from error
    assert isinstance(dataset, DatasetDict), "without `split` and `streaming`, load_dataset returns all splits"
    rows: Iterable[Mapping[str, Any]] = dataset["test"] if "test" in dataset else next(iter(dataset.values()))
    for number, row in enumerate(rows):
        yield _to_prompt(row, (column,) if column else FIELDS, name, f"{source}, row {number}")


def _to_prompt(row: Mapping[str, Any], fields: Sequence[str], source: str, place: str) -> Prompt:
    field = next((field for field in fields if field in row), None)
    if field is None:
        needed = " or ".join(f"`{name}`" for name in fields)
        raise ValueError(f"{place}: a field {needed} is needed, but there are only {sorted(row)}.")
    turns = [row[field]] if isinstance(row[field], str) else row[field]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{place}: `{field}` has to be a text or a list of texts, none empty, but is {row[field]!r}.")
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
