"""Small data sets of prompts, for the tests of evaluation."""

from typing import Any

from datasets import Dataset, IterableDataset

CHAT = [{"role": "user", "content": "hi"}]
ANSWER = {"role": "assistant", "content": "hello"}


def table(**columns: list[Any]) -> Dataset:
    return Dataset.from_dict(columns)


def rows(*rows: dict[str, Any]) -> Dataset:
    return Dataset.from_list(list(rows))


def stream(**columns: list[Any]) -> IterableDataset:
    """A data set that does not tell its length."""
    return table(**columns).to_iterable_dataset()
