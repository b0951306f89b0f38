"""What `benchmark.py` measures: each case times its baselines and ours in turn, in one run."""

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, RepetitionPenaltyLogitsProcessor

from hf_specgen import Decoder, DecodingStats, DSparkModel, Request, TokenPenalties, enable_speculation
from hf_specgen.drafters.step_costs import time_now
from hf_specgen.engine.batch import forward
from hf_specgen.engine.model_facts import eos_ids
from hf_specgen.layers.attention import grouped_attention
from hf_specgen.layers.linear import tune_linears
from hf_specgen.layers.slot_cache import SlotCache

from ..loading import left_padded
from .reference_dspark import reference_generate

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


@dataclass
class Runner:
    """One thing to time: `run` gives outputs and, for ours, statistics; `prefill` is the same run for one token."""

    name: str
    run: Callable[[], tuple[Outputs, DecodingStats | None]]
    is_tuned: bool = False
    prefill: Callable[[], Any] | None = None
    seconds: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    outputs: Outputs = field(default_factory=list)
    stats: DecodingStats | None = None


@dataclass(frozen=True)
class Measurement:
    """
    A line of the table; of one process until the processes are added up.

    Args:
        name (`str`): what was run.
        batch_size (`int`): rows side by side.
        tokens (`int`): useful tokens per run.
        seconds (`float`): the median over the repeats.
        num_equal (`int`, *optional*): prompts whose ids equal those of the first line. None where ids are sampled.
        prefill_seconds (`float`, *optional*): the median time of the same with one new token per prompt.
        largest_gap (`float`): where ids differ, the distance of the two best logits at the first difference, at most
            over the prompts; other kernels round differently, so a near tie may fall the other way.
        num_prompts (`int`): prompts.
        stats ([`DecodingStats`], *optional*): statistics of the last run of our loop.
    """

    name: str
    batch_size: int
    tokens: int
    seconds: float
    num_equal: int | None
    num_prompts: int
    prefill_seconds: float | None = None
    largest_gap: float = 0.0
    stats: DecodingStats | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first one of each prompt, without the time of the prefill."""
        if self.prefill_seconds is None or self.seconds <= self.prefill_seconds:
            return None
        return (self.tokens - self.num_prompts) / (self.seconds - self.prefill_seconds)

    def to_dict(self) -> dict[str, Any]:
        """The values and rates as plain numbers, lists and dicts, for JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {
            "stats": None if self.stats is None else self.stats.to_dict(),
            "tokens_per_second": self.tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }


def measure(runners: list[Runner], setting: Setting, batch_size: int, do_sample: bool = False) -> list[Measurement]:
    """Times the runners in turn, after one warm-up each; the ids are compared to the first one's unless sampled."""
    steps = tqdm(total=len(runners) * (setting.repeats + 1), desc=f"batch {batch_size}", disable=not setting.is_main)
    for repeat in range(setting.repeats + 1):
        for runner in runners:
            tuning = tune_linears(setting.model) if runner.is_tuned else None
            start = time.perf_counter()
            runner.outputs, runner.stats = runner.run()
            middle = time.perf_counter()
            if runner.prefill is not None:
                runner.prefill()
            end = time.perf_counter()
            if tuning is not None:
                tuning.restore()
            if repeat > 0:
                runner.seconds.append(middle - start)
                runner.prefill_seconds.append(end - middle)
            steps.update()
    steps.close()
    lines = []
    for runner in runners:
        pairs = [] if do_sample else list(zip(setting.prompts, runners[0].outputs, runner.outputs))
        lines.append(
            Measurement(
                name=runner.name,
                batch_size=batch_size,
                tokens=sum(map(len, runner.outputs)),
                seconds=statistics.median(runner.seconds),
                num_equal=None if do_sample else sum(expected == actual for _, expected, actual in pairs),
                num_prompts=len(runner.outputs),
                prefill_seconds=statistics.median(runner.prefill_seconds) if runner.prefill is not None else None,
                largest_gap=max((top_gap(setting.model, *pair) for pair in pairs), default=0.0),
                stats=runner.stats,
            )
        )
    return lines


@torch.no_grad()
def top_gap(model: PreTrainedModel, prompt: list[int], expected: list[int], actual: list[int]) -> float:
    """The distance of the two best logits where `actual` first differs from `expected`, 0 if it does not."""
    if expected == actual:
        return 0.0
    position = next((i for i, (a, b) in enumerate(zip(expected, actual)) if a != b), min(len(expected), len(actual)))
    input_ids = torch.tensor([prompt + expected[:position]], device=model.device)
    best, second = model(input_ids, logits_to_keep=1).logits[0, -1].float().topk(2).values.tolist()
    return best - second


def on_device(batch: dict[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.to(model.device) for name, tensor in batch.items()}


def generate_in_batches(model: PreTrainedModel, setting: Setting, batch_size: int, **kwargs: Any) -> tuple:
    """`generate` over padded batches in the order of the prompts; padding and what follows eos is dropped."""
    outputs: Outputs = []
    stats: DecodingStats | None = None
    ends = eos_ids(model.generation_config.eos_token_id)
    for start in range(0, len(setting.prompts), batch_size):
        batch = left_padded(setting.prompts[start : start + batch_size], setting.pad_token_id)
        batch = on_device(batch, model)
        ids = model.generate(**batch, **(setting.generate_kwargs | kwargs))
        for row in ids[:, batch["input_ids"].shape[1] :].tolist():
            end = next((i + 1 for i, token_id in enumerate(row) if token_id in ends), len(row))
            outputs.append(row[:end])
        if kwargs.keys() & {"assistant_model", "prompt_lookup_num_tokens"}:
            own = getattr(model, "speculation_stats", None)
            stats = own if stats is None or own is None else stats + own
    return outputs, stats


def speculation_case(setting: Setting, batch_size: int, draft_kwargs: dict, is_tuned: bool) -> list[Measurement]:
    """Plain and stock assisted `generate` against ours with the same drafter."""
    plain = copy.copy(setting.model)  # shares the weights, keeps its class
    ours = enable_speculation(copy.copy(setting.model))

    def runner(name: str, model: PreTrainedModel, tuned: bool = False, **kwargs: Any) -> Runner:
        run = partial(generate_in_batches, model, setting, batch_size, **kwargs)
        return Runner(name, run, tuned, partial(run, max_new_tokens=1))

    runners = [runner("plain generate", plain)]
    draft = draft_kwargs.get("assistant_model")
    if batch_size == 1:
        if isinstance(draft, DSparkModel) and not setting.generate_kwargs["do_sample"]:
            run = partial(reference_case, draft, setting)
            runners.append(Runner("straightforward DSpark loop", run, prefill=partial(run, max_new_tokens=1)))
        runners.append(runner("stock assisted generate", plain, **draft_kwargs))
    runners.append(runner("speculative", ours, **draft_kwargs))
    if is_tuned:
        runners.append(runner("plain generate, tuned linears", plain, tuned=True))
        runners.append(runner("speculative, tuned linears", ours, tuned=True, **draft_kwargs))
    return measure(runners, setting, batch_size, setting.generate_kwargs["do_sample"])


def reference_case(draft: DSparkModel, setting: Setting, max_new_tokens: int | None = None) -> tuple[Outputs, None]:
    """The loop of reference_dspark.py over the prompts, one by one."""
    count = setting.generate_kwargs["max_new_tokens"] if max_new_tokens is None else max_new_tokens
    ends = eos_ids(setting.model.generation_config.eos_token_id)
    return [reference_generate(setting.model, draft, prompt, count, ends) for prompt in setting.prompts], None


def ragged_budgets(setting: Setting) -> list[int]:
    """Budgets from 8 to 128 tokens, one per prompt."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(8, 129, (len(setting.prompts),), generator=generator).tolist()


def ragged_padded(setting: Setting, budgets: list[int], order: list[int], seats: int) -> tuple[Outputs, None]:
    """Padded `generate` over batches in this order, each as long as its largest budget."""
    outputs: dict[int, list[int]] = {}
    for start in range(0, len(order), seats):
        chosen = order[start : start + seats]
        batch = left_padded([setting.prompts[index] for index in chosen], setting.pad_token_id)
        batch = on_device(batch, setting.model)
        longest = max(budgets[index] for index in chosen)
        ids = setting.model.generate(**batch, max_new_tokens=longest, do_sample=False, eos_token_id=None)
        for index, row in zip(chosen, ids[:, batch["input_ids"].shape[1] :].tolist()):
            outputs[index] = row[: budgets[index]]
    return [outputs[index] for index in range(len(order))], None


def ragged_case(setting: Setting, seats: int) -> list[Measurement]:
    """Ragged budgets, greedy, without eos: padded `generate` in batches against the decoder with as many seats."""
    budgets = ragged_budgets(setting)
    by_budget = sorted(range(len(budgets)), key=lambda index: -budgets[index])

    def seated() -> tuple[Outputs, DecodingStats]:
        requests = [Request(prompt, budget) for prompt, budget in zip(setting.prompts, budgets)]
        decoder = Decoder(setting.model, max_batch_size=seats)
        for _ in decoder.run(requests):
            pass
        return [request.token_ids for request in requests], decoder.stats

    runners = [
        Runner(
            f"padded generate in batches of {seats}",
            lambda: ragged_padded(setting, budgets, list(range(len(budgets))), seats),
        ),
        Runner("the same, batches sorted by budget", lambda: ragged_padded(setting, budgets, by_budget, seats)),
        Runner(f"Decoder with {seats} seats", seated),
    ]
    return measure(runners, setting, seats)


def batching_case(setting: Setting, batch_size: int, draft_kwargs: dict) -> list[Measurement]:
    """Speculation one prompt at a time against speculation in a batch."""
    model = enable_speculation(copy.copy(setting.model))
    runners = [
        Runner("speculative, one by one", lambda: generate_in_batches(model, setting, 1, **draft_kwargs)),
        Runner(
            f"speculative, batches of {batch_size}",
            lambda: generate_in_batches(model, setting, batch_size, **draft_kwargs),
        ),
    ]
    return measure(runners, setting, batch_size, setting.generate_kwargs["do_sample"])


def attention_case(setting: Setting, cached_lengths: tuple[int, ...] = (200, 3000), new: int = 5) -> list[dict]:
    """A verification pass of `new` positions, through transformers' sdpa with a boolean mask and as in our loop."""
    model, rows, num_tokens = setting.model, slice(0, 1), torch.tensor([new])
    results = []
    for cached in cached_lengths:
        cache = SlotCache(model.config, num_rows=1)
        ids = torch.randint(3, 1000, (1, cached + new), generator=torch.Generator().manual_seed(0))
        ids = ids.to(model.device)
        with torch.no_grad():
            forward(model, cache, rows, ids[:, :cached], torch.tensor([cached]), logits_to_keep=1)
        times: dict[str, list[float]] = {"sdpa": [], "grouped": []}
        logits = {}
        for repeat in range(5 * setting.repeats + 1):
            for name in times:
                start = time_now(model)
                with torch.no_grad():
                    if name == "grouped":
                        with grouped_attention(model):
                            outputs = forward(model, cache, rows, ids[:, cached:], num_tokens)
                    else:
                        write = cache.begin(rows, num_tokens, new, ids.device)
                        mask = cache.attention_mask(is_additive=False, dtype=model.dtype)
                        inputs = {"attention_mask": mask, "position_ids": write.position_ids, "cache": cache}
                        outputs = model(ids[:, cached:], use_cache=True, **inputs)
                if repeat > 0:
                    times[name].append(time_now(model) - start)
                logits[name] = outputs.logits
                cache.truncate(0, cached)
        sdpa, grouped = (statistics.median(times[name]) for name in ("sdpa", "grouped"))
        results.append(
            {
                "cached_tokens": cached,
                "new_positions": new,
                "sdpa_ms": 1e3 * sdpa,
                "grouped_ms": 1e3 * grouped,
                "speedup": sdpa / grouped,
                "max_difference": float((logits["sdpa"] - logits["grouped"]).abs().max()),
            }
        )
    return results


def processors_case(repeats: int, vocab_size: int = 151_936, length: int = 4096, rows: int = 8) -> dict[str, float]:
    """Milliseconds per step of all three penalties at once, against transformers' repetition penalty alone."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (rows, length), generator=generator)
    block = torch.randint(0, vocab_size, (rows, 4), generator=generator)
    scores = {positions: torch.randn(rows, positions, vocab_size) for positions in (1, 5)}
    fused, stock = TokenPenalties(1.3, 0.1, 0.1), RepetitionPenaltyLogitsProcessor(1.3)
    counts, indices = fused.make_counts(ids), list(range(rows))
    calls: dict[str, Callable[[], Any]] = {
        "transformers_repetition": lambda: stock(ids, scores[1][:, 0]),
        "as_processor": lambda: fused(ids, scores[1][:, 0]),
        "in_loop_1_position": lambda: fused.apply_(scores[1], counts, indices, block[:, :0]),
        "in_loop_5_positions": lambda: fused.apply_(scores[5], counts, indices, block),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(20 * repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def overhead_case(setting: Setting, draft_kwargs: dict) -> dict[str, Any]:
    """The share of a round that is not the target's pass, at batch 1 with all penalties on; None without a round."""
    model = enable_speculation(copy.copy(setting.model))
    penalties = [TokenPenalties(1.1, 0.1, 0.1)]
    _, stats = generate_in_batches(model, setting, 1, logits_processor=penalties, **draft_kwargs)
    seconds = (stats or DecodingStats()).seconds
    total = sum(seconds.values())
    own = seconds["processors"] + seconds["other"]
    return {"seconds": dict(seconds), "processors_verification_bookkeeping_share": own / total if total else None}
