"""Measures what a target pass over a few new tokens costs, for policies that weigh candidates against time.

The pass is the one that the decoder runs: the same cache, mask and attention. Knows no drafting and no requests.
"""

import time
from statistics import median

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from .attention import grouped_attention
from .cache import SlotCache
from .compatibility import learned_positions, num_input_ids, unsupported_reason
from .draft_length import StepCosts
from .drafting import check_count
from .rows import forward, forward_last

PROFILED_POSITIONS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)  # per row; beyond, only the most asked for
DEFAULT_POSITIONS = 16


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
    return torch.randint(num_input_ids(model), (num_rows, length), generator=generator).to(model.device)


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
