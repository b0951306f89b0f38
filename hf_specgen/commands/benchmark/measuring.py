"""Times several ways to decode the same prompts in turn, and says how fast each was. Knows no case."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_specgen import DecodingStats, tune_linears

Outputs = list[list[int]]  # generated ids per prompt


@dataclass(frozen=True)
class Setting:
    """Everything that the cases have in common."""

    model: PreTrainedModel
    prompts: list[list[int]]
    generate_kwargs: dict
    repeats: int
    pad_token_id: int
    is_main: bool = True


@dataclass(frozen=True)
class Repeat:
    """
    One timed run over all prompts.

    Args:
        tokens (`int`): useful tokens.
        seconds (`float`): what they took.
        prefill_seconds (`float`, *optional*): what the same took right after, with one new token per prompt.
        stats ([`DecodingStats`], *optional*): statistics of our loop.
    """

    tokens: int
    seconds: float
    prefill_seconds: float | None = None
    stats: DecodingStats | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Measurement:
    """
    A line of the table; of one process until the processes are added up.

    Args:
        name (`str`): what was run.
        batch_size (`int`): rows side by side.
        repeats (`tuple[Repeat, ...]`): the timed runs, in their order.
        num_prompts (`int`): prompts.
        num_equal (`int`, *optional*): prompts whose ids equal those of the first line. None where ids are sampled.
        largest_gap (`float`): where ids differ, the distance of the two best logits at the first difference, at most
            over the prompts; other kernels round differently, so a near tie may fall the other way.
    """

    name: str
    batch_size: int
    repeats: tuple[Repeat, ...]
    num_prompts: int
    num_equal: int | None
    largest_gap: float = 0.0

    @property
    def median(self) -> Repeat:
        """The repeat whose throughput is in the middle: its tokens belong to its time."""
        return sorted(self.repeats, key=lambda repeat: repeat.tokens_per_second)[(len(self.repeats) - 1) // 2]

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first one of each prompt, without the time of the prefill."""
        repeat = self.median
        if repeat.prefill_seconds is None or repeat.seconds <= repeat.prefill_seconds:
            return None
        return (repeat.tokens - self.num_prompts) / (repeat.seconds - repeat.prefill_seconds)

    def to_dict(self) -> dict[str, Any]:
        """The values and rates as plain numbers, lists and dicts, for JSON."""
        repeat = self.median
        return {
            "name": self.name,
            "batch_size": self.batch_size,
            "tokens": repeat.tokens,
            "seconds": repeat.seconds,
            "prefill_seconds": repeat.prefill_seconds,
            "num_prompts": self.num_prompts,
            "num_equal": self.num_equal,
            "largest_gap": self.largest_gap,
            "stats": None if repeat.stats is None else repeat.stats.to_dict(),
            "tokens_per_second": repeat.tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "all_tokens": [each.tokens for each in self.repeats],
            "all_seconds": [each.seconds for each in self.repeats],
        }


@dataclass
class Runner:
    """One thing to time: `run` gives outputs and, for ours, statistics; `prefill` is the same run for one token."""

    name: str
    run: Callable[[], tuple[Outputs, DecodingStats | None]]
    is_tuned: bool = False
    prefill: Callable[[], Any] | None = None
    repeats: list[Repeat] = field(default_factory=list)
    outputs: Outputs = field(default_factory=list)


class Interrupted(KeyboardInterrupt):
    """
    Ctrl-C while a case was measured.

    Args:
        lines (`list[Measurement]`): of the repeats that were finished.
    """

    def __init__(self, lines: list[Measurement]):
        super().__init__()
        self.lines = lines


def measure(runners: list[Runner], setting: Setting, batch_size: int, do_sample: bool = False) -> list[Measurement]:
    """
    Times the runners in turn, after one warm-up each; the ids are compared to the first one's unless sampled.

    Raises:
        [`Interrupted`]: on Ctrl-C once every runner has been timed, with what is measured.
    """
    total = len(runners) * (setting.repeats + 1)
    with tqdm(total=total, desc=f"batch {batch_size}", disable=not setting.is_main) as progress:
        try:
            for number in range(setting.repeats + 1):
                for runner in runners:
                    progress.set_postfix_str(runner.name if number else f"{runner.name}, warm-up")
                    repeat = time_once(runner, setting.model)
                    if number > 0:
                        runner.repeats.append(repeat)
                    progress.update()
        except KeyboardInterrupt:
            if not all(runner.repeats for runner in runners):
                raise
            lines = [line_of(runner, runners[0], setting, batch_size, do_sample) for runner in runners]
            raise Interrupted(lines) from None
    return [line_of(runner, runners[0], setting, batch_size, do_sample) for runner in runners]


def time_once(runner: Runner, model: PreTrainedModel) -> Repeat:
    tuning = tune_linears(model) if runner.is_tuned else None
    try:
        start = time.perf_counter()
        runner.outputs, stats = runner.run()
        middle = time.perf_counter()
        if runner.prefill is not None:
            runner.prefill()
        end = time.perf_counter()
    finally:
        if tuning is not None:
            tuning.restore()
    tokens = sum(map(len, runner.outputs))
    return Repeat(tokens, middle - start, end - middle if runner.prefill is not None else None, stats)


def line_of(runner: Runner, first: Runner, setting: Setting, batch_size: int, do_sample: bool) -> Measurement:
    pairs = [] if do_sample else list(zip(setting.prompts, first.outputs, runner.outputs))
    return Measurement(
        name=runner.name,
        batch_size=batch_size,
        repeats=tuple(runner.repeats),
        num_prompts=len(runner.outputs),
        num_equal=None if do_sample else sum(expected == actual for _, expected, actual in pairs),
        largest_gap=max((top_gap(setting.model, *pair) for pair in pairs), default=0.0),
    )


@torch.no_grad()
def top_gap(model: PreTrainedModel, prompt: list[int], expected: list[int], actual: list[int]) -> float:
    """The distance of the two best logits where `actual` first differs from `expected`, 0 if it does not."""
    if expected == actual:
        return 0.0
    position = next((i for i, (a, b) in enumerate(zip(expected, actual)) if a != b), min(len(expected), len(actual)))
    input_ids = torch.tensor([prompt + expected[:position]], device=model.device)
    best, second = model(input_ids, logits_to_keep=1).logits[0, -1].float().topk(2).values.tolist()
    return best - second


def total_of(parts: tuple[Measurement, ...]) -> Measurement:
    """One line of all processes: per repeat all tokens and the slowest process's time."""
    num_equal = [part.num_equal for part in parts if part.num_equal is not None]
    return replace(
        parts[0],
        repeats=tuple(total_repeat(repeats) for repeats in zip(*(part.repeats for part in parts))),
        num_prompts=sum(part.num_prompts for part in parts),
        num_equal=sum(num_equal) if num_equal else None,
        largest_gap=max(part.largest_gap for part in parts),
    )


def total_repeat(parts: tuple[Repeat, ...]) -> Repeat:
    """A process without prompts has no statistics."""
    prefill_seconds = [part.prefill_seconds for part in parts if part.prefill_seconds is not None]
    stats = [part.stats for part in parts if part.stats is not None]
    return Repeat(
        tokens=sum(part.tokens for part in parts),
        seconds=max(part.seconds for part in parts),
        prefill_seconds=max(prefill_seconds, default=None),
        stats=sum(stats, DecodingStats()) if stats else None,
    )
