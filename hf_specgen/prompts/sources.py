"""Prompts to measure and to demonstrate with: the built-in set, JSONL files and data sets. Knows nothing of models."""

from collections.abc import Sequence
from importlib import resources

from ..arguments import check_count
from .data_sets import read_data_set
from .jsonl import parse, read_file
from .prompt import Prompt

BUILTIN_NAME = "builtin"
BUILTIN_FILE = "builtin.jsonl"


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
        `ImportError`: for a data set, if `datasets` is not installed.
        `ValueError`: if the source cannot be read, a row has no usable text, a category is unknown, or `limit` is
        below 1.
    """
    if limit is not None:
        check_count("limit", limit)
    if isinstance(categories, str):
        raise ValueError(f"`categories` has to be a sequence of names, but is the string {categories!r}.")

    if source == BUILTIN_NAME:
        text = resources.files(__package__).joinpath(BUILTIN_FILE).read_text(encoding="utf-8")
        prompts = list(parse(text, source))
    elif source.endswith(".jsonl"):
        prompts = list(read_file(source))
    else:
        prompts = list(read_data_set(source))
    if not prompts:
        raise ValueError(f"`source` has to hold at least one prompt, but {source!r} is empty.")

    if categories is not None:
        known = sorted({prompt.category for prompt in prompts})
        unknown = sorted(set(categories).difference(known))
        if unknown or not categories:
            raise ValueError(f"`categories` has to name some of {known}, but is {list(categories)}.")
        prompts = [prompt for prompt in prompts if prompt.category in categories]
    return prompts[:limit]
