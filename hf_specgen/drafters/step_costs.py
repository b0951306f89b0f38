"""Measures what a target pass over a few new tokens costs, for policies that weigh candidates against time.

The pass is the one that the decoder runs: the same cache, mask and attention. Knows no drafting and no requests.
"""

import json
import time
from bisect import bisect_left
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from ..arguments import check_count, checked_number
from ..engine.batch import forward, forward_last
from ..engine.model_facts import execution_device, learned_positions, num_input_ids
from ..engine.support import unsupported_reason
from ..layers.attention import grouped_attention
from ..layers.slot_cache import SlotCache

PROFILED_POSITIONS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)  # per row; beyond, only the most asked for
DEFAULT_POSITIONS = 16


@dataclass(frozen=True)
class StepCosts:
    """
    What a target pass costs, by the number of tokens in it.

    Args:
        milliseconds (`dict[int, float]`):
            Number of tokens in one pass, all rows together -> median milliseconds.
        model (`str`):
            What was measured.
        device (`str`):
            Where it was measured.
        num_rows (`int`):
            The number of rows, each of which had the same share of the tokens.
        context_length (`int`):
            The number of cached tokens in each row.

    Raises:
        `TypeError`: if a value is of another kind.
        `ValueError`: if there is no entry, a number of tokens is below 1, or a cost is not finite and above 0.
    """

    milliseconds: dict[int, float]
    model: str
    device: str
    num_rows: int
    context_length: int

    def __post_init__(self) -> None:
        if not isinstance(self.milliseconds, dict):
            raise TypeError(f"`milliseconds` has to be a dict, but is {self.milliseconds!r}.")
        if not self.milliseconds:
            raise ValueError("`milliseconds` has to hold at least one entry, but is empty.")
        for num_tokens, cost in self.milliseconds.items():
            check_count("milliseconds", num_tokens)
            if checked_number(f"milliseconds[{num_tokens}]", cost) <= 0:
                raise ValueError(f"`milliseconds[{num_tokens}]` has to be above 0, but is {cost!r}.")
        for name, text in (("model", self.model), ("device", self.device)):
            if not isinstance(text, str):
                raise TypeError(f"`{name}` has to be a str, but is {text!r}.")
        check_count("num_rows", self.num_rows)
        check_count("context_length", self.context_length, minimum=0)

    @cached_property
    def _measured(self) -> list[int]:
        return sorted(self.milliseconds)

    def at(self, num_tokens: int) -> float:
        """
        Milliseconds of a pass over `num_tokens` tokens: linear between measured numbers, constant below the smallest,
        and beyond the largest on the line through the last two, where it does not fall.
        """
        measured, costs = self._measured, self.milliseconds
        if num_tokens <= measured[0] or len(measured) == 1:
            return costs[measured[0]]
        right = min(bisect_left(measured, num_tokens), len(measured) - 1)
        before, after = measured[right - 1], measured[right]
        slope = (costs[after] - costs[before]) / (after - before)
        if num_tokens > after:
            slope = max(slope, 0.0)
        return costs[after] + slope * (num_tokens - after)

    def save(self, path: str | Path) -> None:
        """Writes a JSON file that `load` reads."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """
        Reads what `save` wrote.

        Raises:
            `ValueError`: if the file holds something else, naming it and what is wrong.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**_named_values(values, {field.name for field in fields(cls)}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} holds no step costs: {error}") from error


def _named_values(values: Any, names: set[str]) -> dict[str, Any]:
    """The arguments of `StepCosts` in a JSON object, whose keys are strings even where they mean numbers."""
    if not isinstance(values, dict):
        raise ValueError(f"it has to be a JSON object, but is a {type(values).__name__}.")
    if missing := sorted(names - set(values)):
        raise ValueError(f"it lacks {missing}.")
    if unknown := sorted(set(values) - names):
        raise ValueError(f"it has {unknown}, which mean nothing here.")
    if isinstance(values["milliseconds"], dict):
        values["milliseconds"] = {int(num_tokens): cost for num_tokens, cost in values["milliseconds"].items()}
    return values


@torch.no_grad()
def profile_step_costs(
    model: PreTrainedModel,
    num_rows: int = 1,
    max_tokens: int | None = None,
    context_length: int = 256,
    repeats: int = 5,
) -> StepCosts:
    """
    Times the target's verification pass over random tokens, for [`ThroughputScheduler`]. All rows have the same
    number of new positions, as they do after padding.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The target, where it will decode.
        num_rows (`int`, *optional*, defaults to 1):
            How many rows are decoded side by side.
        max_tokens (`int`, *optional*):
            The most tokens of a pass, all rows together: a multiple of `num_rows`, by default 16 for each.
        context_length (`int`, *optional*, defaults to 256):
            How many tokens each row has in the cache.
        repeats (`int`, *optional*, defaults to 5):
            How often each number of tokens is timed, after one warm-up; the median counts.

    Returns:
        [`StepCosts`]: the medians, at 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, ... positions per row and at the most of them.

    Raises:
        `TypeError`, `ValueError`: if an argument is no such number, the loop cannot serve the model, or the model has
            learned positions for fewer tokens.
    """
    _check_model(model)
    check_count("num_rows", num_rows)
    check_count("context_length", context_length)
    check_count("repeats", repeats)
    max_tokens = check_count("max_tokens", DEFAULT_POSITIONS * num_rows if max_tokens is None else max_tokens)
    if max_tokens % num_rows > 0:
        raise ValueError(f"`max_tokens` has to be a multiple of `num_rows` ({num_rows}), but is {max_tokens}.")
    most = max_tokens // num_rows
    _check_length(model, context_length + most)
    positions = [*(count for count in PROFILED_POSITIONS if count < most), most]
    is_training = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with grouped_attention(model):
            seconds = _measure(model, _token_ids(model, num_rows, context_length + most), positions, repeats)
    finally:
        for module, training in is_training.items():
            module.training = training
    return StepCosts(
        milliseconds={num_rows * count: 1e3 * median(times) for count, times in seconds.items()},
        model=model.config.name_or_path or type(model).__name__,
        device=_device_name(model),
        num_rows=num_rows,
        context_length=context_length,
    )


def time_now(model: PreTrainedModel) -> float:
    """Seconds, once what the model's device has been asked for is done."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def _check_model(model: PreTrainedModel) -> None:
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"`model` has to be a causal language model, but is a {type(model).__name__!r}.")
    if reason := unsupported_reason(model):
        raise ValueError(f"The decoding loop cannot serve this model: {reason}.")


def _check_length(model: PreTrainedModel, num_tokens: int) -> None:
    limit = learned_positions(model)
    if limit is not None and num_tokens > limit:
        raise ValueError(
            f"`context_length` and the new positions come to {num_tokens} tokens, but the model has learned positions "
            f"for {limit}. Lower `context_length`."
        )


def _token_ids(model: PreTrainedModel, num_rows: int, length: int) -> Tensor:  # (num_rows, length)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(num_input_ids(model), (num_rows, length), generator=generator).to(execution_device(model))


def _measure(model: PreTrainedModel, token_ids: Tensor, positions: list[int], repeats: int) -> dict[int, list[float]]:
    """Seconds of each pass, by the number of new positions; the last columns of `token_ids` are the new ones."""
    num_rows, length = token_ids.shape
    context_length = length - positions[-1]
    rows, cache = slice(0, num_rows), SlotCache(model.config, num_rows)
    context = token_ids[:, :context_length]
    forward_last(model, cache, rows, context, torch.full((num_rows,), context_length))
    seconds: dict[int, list[float]] = {count: [] for count in positions}
    with tqdm(total=len(positions) * (repeats + 1), desc="step costs", disable=None) as steps:
        for repeat in range(repeats + 1):  # the first is the warm-up
            # The counts take turns, up and down, so that what changes over time changes them all alike.
            for count in positions if repeat % 2 else reversed(positions):
                new_ids = token_ids[:, context_length : context_length + count]
                start = time_now(model)
                forward(model, cache, rows, new_ids, torch.full((num_rows,), count))
                end = time_now(model)
                if repeat > 0:
                    seconds[count].append(end - start)
                for row in range(num_rows):
                    cache.truncate(row, context_length)
                steps.update()
    return seconds


def _device_name(model: PreTrainedModel) -> str:
    if model.device.type == "cuda":
        return torch.cuda.get_device_name(model.device)
    return f"{model.device.type}, threads: {torch.get_num_threads()}"
