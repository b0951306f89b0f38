"""Prompts of data sets that the `datasets` library loads: an optional package, imported only here and when needed."""

from collections.abc import Iterator
from pathlib import Path

from .prompt import FIELDS, Prompt, prompt_of_row


def read_data_set(source: str) -> Iterator[Prompt]:
    """
    The prompts of a data set: of its split `test`, or of the first one.

    Args:
        source (`str`): A name for `load_dataset`, with a column after a colon where it is not called as usual.

    Raises:
        `ImportError`: if `datasets` is not installed.
        `ValueError`: if the data set cannot be loaded, or with the number of a row that holds no prompt.
    """
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ImportError(
            f"Prompts of the data set {source!r} need the package `datasets`: pip install hf-specgen[commands]"
        ) from error
    name, _, column = source.partition(":")
    path, config = name, None
    if name.count("/") == 2 and not Path(name).exists():  # owner/name/config on the hub
        path, _, config = name.rpartition("/")
    try:
        dataset = load_dataset(path, config)
    except (OSError, ValueError, DatasetsError) as error:
        raise ValueError(
            "`source` has to be 'builtin', the path of a .jsonl file, or the name of a data set that `datasets` can "
            f"load, but is {source!r}: {error}"
        ) from error
    rows = dataset["test"] if "test" in dataset else next(iter(dataset.values()))
    for number, row in enumerate(rows):
        yield prompt_of_row(row, (column,) if column else FIELDS, name, f"{source}, row {number}")
