"""EvalPrompts: the prompts and references of an evaluation, read from lists and data sets.

Knows no model and no tokenizer. A prompt never holds text of its reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

from hf_specgen.arguments import check_count, shown
from hf_specgen.serving import Prompt, are_messages

from .prompt_columns import TEMPLATE_COLUMNS, Columns, check_known, template_settings, text_of_reference


@dataclass(frozen=True)
class EvalPrompts:
    """
    Prompts and references, checked.

    Args:
        prompts (`tuple`):
            Texts, lists of ids, or lists of chat messages; at least one.
        references (`tuple`, *optional*):
            One for each prompt: a text, or whatever the metrics compare with.
        template_settings (`tuple`, *optional*):
            One for each prompt: the `tools` and `chat_template_kwargs` of [`SamplingParams`] that are its own.

    Raises:
        `ValueError`: for no prompts, a prompt that is none of these, or another number of references than of prompts.
    """

    prompts: tuple[Prompt, ...]
    references: tuple[Any, ...] | None = None
    template_settings: tuple[Mapping[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("`prompts` has to hold at least one prompt, but is empty.")
        for number, prompt in enumerate(self.prompts):
            _check_prompt(prompt, number)
        if self.references is not None and len(self.references) != len(self.prompts):
            raise ValueError(
                f"`references` has to hold one for each of the {len(self.prompts)} prompts, but holds "
                f"{len(self.references)}."
            )

    @classmethod
    def of(
        cls,
        prompts: Any,
        references: Sequence[Any] | None = None,
        max_prompts: int | None = None,
        **columns: str | None,
    ) -> "EvalPrompts":
        r"""
        Reads prompts from a list or a data set.

        Args:
            prompts (`Sequence`, [`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
                A list of texts, ids or chat messages, or a data set with columns of these.
            references (`Sequence`, *optional*):
                One for each prompt, in place of a column.
            max_prompts (`int`, *optional*):
                Read the first ones only. An `IterableDataset` needs it.
            columns (`str`, *optional*):
                Which columns of a data set to read. By default the first that there is of `prompt`, `question`,
                `messages`, and of `completion`, `answer`.

                - `prompt_column`, `completion_column`: prompts of any kind, and their references.
                - `messages_column`: conversations. The last message of the assistant is the reference, and what is
                  before it the prompt.
                - `text_column` (`text` by default) with `split_marker`: the text up to and with the first marker is
                  the prompt, the rest the reference.

                Of conversations, the columns `tools` (lists, or JSON) and `chat_template_kwargs` are read too, if they
                are there, as TRL's trainers do: the chat template gets them.

        Raises:
            `ValueError` or `TypeError`: naming the columns that there are, or the row that cannot be read.
        """
        if max_prompts is not None:
            max_prompts = check_count("max_prompts", max_prompts)
        check_known(columns, cls.of)
        wanted = Columns.of(columns)
        given = None
        if references is not None:
            listed = _as_tuple(references, "references")
            given = tuple(text_of_reference(reference, number) for number, reference in enumerate(listed))
        if isinstance(prompts, (Dataset, IterableDataset)):
            return _read(prompts, given, wanted, max_prompts)
        if isinstance(prompts, (DatasetDict, IterableDatasetDict)):
            raise TypeError(f"`prompts` has to be one split of the data set: choose one of {sorted(prompts)}.")
        if names := wanted.given():
            raise ValueError(f"`{names[0]}` is for a data set, but `prompts` is a {type(prompts).__name__}.")
        return cls(_as_tuple(prompts, "prompts"), given).limited(max_prompts)

    def limited(self, max_prompts: int | None) -> "EvalPrompts":
        """The first `max_prompts`, all if it is None."""
        if max_prompts is None:
            return self
        max_prompts = check_count("max_prompts", max_prompts)
        references = None if self.references is None else self.references[:max_prompts]
        settings = None if self.template_settings is None else self.template_settings[:max_prompts]
        return EvalPrompts(self.prompts[:max_prompts], references, settings)


def _read(
    dataset: Dataset | IterableDataset, references: tuple | None, wanted: Columns, max_prompts: int | None
) -> EvalPrompts:
    if references is not None and wanted.completion_column is not None:
        raise ValueError("`references` and `completion_column` both give references; use one of them.")
    if isinstance(dataset, Dataset):
        if references is not None and len(references) != len(dataset):
            raise ValueError(
                f"`references` has to hold one for each of the {len(dataset)} rows, but holds {len(references)}."
            )
        dataset = dataset.select(range(len(dataset) if max_prompts is None else min(max_prompts, len(dataset))))
    elif max_prompts is None:
        raise ValueError("`max_prompts` has to be given for an IterableDataset, which may have no end.")
    else:
        dataset = dataset.take(max_prompts).with_format(None)  # lists rather than tensors
    columns, rows = _located_rows(dataset, wanted)
    pairs = [columns.split(row, number) for number, row in enumerate(rows)]
    if references is not None:
        references = references[:max_prompts]
    elif columns.has_references:
        references = tuple(reference for _, reference in pairs)
    prompts = tuple(prompt for prompt, _ in pairs)
    settings = tuple(
        template_settings(row, number) if are_messages(prompt) else {}
        for number, (row, prompt) in enumerate(zip(rows, prompts))
    )
    return EvalPrompts(prompts, references, settings if any(settings) else None)


def _located_rows(dataset: Dataset | IterableDataset, wanted: Columns) -> tuple[Columns, list[dict[str, Any]]]:
    """The columns to read and the rows, of which other columns are not decoded where that can be known."""
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":  # a transform may make columns
        rows = list(dataset)
        return wanted.located(list(rows[0])) if rows else wanted, rows
    if len(dataset) == 0:
        return wanted, []
    columns = wanted.located(dataset.column_names)
    told = [name for name in TEMPLATE_COLUMNS if name in dataset.column_names]
    names = dict.fromkeys([*columns.columns().values(), *told])  # each once
    return columns, list(dataset.with_format(None).select_columns(list(names)))


def _check_prompt(prompt: Any, number: int) -> None:
    is_ids = isinstance(prompt, Sequence) and all(isinstance(i, Integral) and not isinstance(i, bool) for i in prompt)
    if isinstance(prompt, str) or are_messages(prompt) or (is_ids and len(prompt) > 0):
        return
    raise TypeError(
        f"A prompt has to be a text, a list of ids or a list of chat messages with roles, but number {number} is "
        f"{shown(prompt)}. A single prompt stands in a list of its own."
    )


def _as_tuple(values: Any, name: str) -> tuple:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"`{name}` has to be a list, or `prompts` a data set with it, but is {shown(values)}.")
    return tuple(values)
