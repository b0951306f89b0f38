"""Decodes a few prompts with SmolLM2-135M in several ways, and shows texts and speeds as they come."""

import textwrap
import time
from dataclasses import dataclass, field

import transformers
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from hf_specgen import DecodingStats, TokenPenalties, enable_speculation, tune_linears
from hf_specgen.prompts import Prompt, encode_prompt, load_prompts

from .models import left_padded, load_model
from .options.checks import EMBEDDED
from .options.demo import CATEGORIES, NUM_PROMPTS, DemoArguments

BATCH_SIZES = (1, 4)
LOOKUPS = (4, 8)  # candidates per round
WARM_UP_TOKENS = 4
CLOSING = (
    "Speed-up is over the faster of the two plain runs of a block. On a CPU of two cores, speculation pays for one "
    "row at a time: a pass has to read all weights anyway, so a few tokens cost little more than one. Four rows with "
    "tuned layers keep the cores nearly busy, every candidate costs time, and a batch waits for its slowest row: "
    "there it pays only where most candidates are kept. Other models and machines differ."
)


@dataclass(frozen=True)
class Setting:
    """How to decode; `num_lookup_tokens` is None for plain decoding."""

    batch_size: int
    has_penalties: bool
    is_tuned: bool = False
    num_lookup_tokens: int | None = None

    @property
    def block(self) -> tuple[int, bool]:
        """What runs that are compared to each other have in common."""
        return self.batch_size, self.has_penalties

    @property
    def name(self) -> str:
        if self.num_lookup_tokens is not None:
            return f"prompt lookup {self.num_lookup_tokens}"
        return "plain, tuned layers" if self.is_tuned else "plain, stock layers"


BLOCKS = [(size, has_penalties) for size in BATCH_SIZES for has_penalties in (False, True)]
STOCK_SETTINGS = [Setting(*block) for block in BLOCKS]
TUNED_SETTINGS = [Setting(*block, True, k) for block in BLOCKS for k in (None, *LOOKUPS)]
SETTINGS = STOCK_SETTINGS + TUNED_SETTINGS
SHOWN = (STOCK_SETTINGS[0], TUNED_SETTINGS[len(LOOKUPS)])  # one row at a time: plain, and with the longest drafts


@dataclass(frozen=True)
class Run:
    """One pass over all prompts."""

    setting: Setting
    outputs: list[list[int]]
    seconds: float
    num_passes: int
    stats: DecodingStats | None

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


def main(args: DemoArguments) -> None:
    transformers.logging.set_verbosity_error()
    console = Console(width=110)
    console.print("Loading SmolLM2-135M-Instruct (the first time it is converted, which takes half a minute) ...")
    model, tokenizer = load_model(EMBEDDED)
    enable_speculation(model)
    prompts = [
        prompt for category, limit in CATEGORIES.items() for prompt in load_prompts("builtin", [category], limit)
    ]
    shown = frozenset(number * NUM_PROMPTS // args.num_shown for number in range(args.num_shown))
    demo = Demo(console, model, tokenizer, prompts, args.max_new_tokens, shown)
    console.print(
        f"{len(SETTINGS)} runs over {NUM_PROMPTS} prompts follow. The texts of the first and of the last one of a row:"
    )
    try:
        demo.decode_all(STOCK_SETTINGS)
        with tune_linears(model) as tuning:
            console.print(f"Tuned {len(tuning.modules)} linear layers for few rows at {tuning.num_threads} threads.")
            demo.decode_all(TUNED_SETTINGS)
    finally:
        show_table(console, demo.runs)


@dataclass(frozen=True)
class Demo:
    """
    What all runs share, and those that are done.

    Args:
        console (`Console`): where everything is shown.
        model, tokenizer: what decodes.
        prompts (`list[Prompt]`): what every run answers.
        max_new_tokens (`int`): the most tokens per prompt.
        shown (`frozenset[int]`): the numbers of the prompts whose answers are shown as they are written.
        runs (`list[Run]`): those that are done.
    """

    console: Console
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    max_new_tokens: int
    shown: frozenset[int]
    runs: list[Run] = field(default_factory=list)

    def decode_all(self, settings: list[Setting]) -> None:
        """Decodes all prompts with every setting, after a short warm-up at every batch size."""
        for size in BATCH_SIZES:
            self.decode(Setting(size, has_penalties=False), self.prompts[:size], WARM_UP_TOKENS)
        for setting in settings:
            run = self.decode(
                setting, self.prompts, self.max_new_tokens, self.shown if setting in SHOWN else frozenset()
            )
            self.runs.append(run)
            left = sum(done.seconds for done in self.runs) / len(self.runs) * (len(SETTINGS) - len(self.runs))
            self.console.print(
                f"{len(self.runs):2}/{len(SETTINGS)}  batch {setting.batch_size}, penalties "
                f"{'on' if setting.has_penalties else 'off'}, {setting.name}: {run.tokens_per_second:.1f} tokens/s; "
                f"about {left:.0f} s left"
            )

    def decode(
        self, setting: Setting, prompts: list[Prompt], max_new_tokens: int, shown: frozenset[int] = frozenset()
    ) -> Run:
        """Decodes the prompts with one setting; what follows the end of an answer is dropped."""
        kwargs: dict = {}
        if setting.num_lookup_tokens is not None:
            kwargs["prompt_lookup_num_tokens"] = setting.num_lookup_tokens
        if setting.has_penalties:
            kwargs["logits_processor"] = [TokenPenalties(1.05, 0.05, 0.0, pad_token_id=self.tokenizer.pad_token_id)]
        outputs: list[list[int]] = []
        num_passes = 0
        seconds = 0.0
        stats = None if setting.num_lookup_tokens is None else DecodingStats()
        for first in range(0, len(prompts), setting.batch_size):
            encoded = [encode_prompt(self.tokenizer, p.turns) for p in prompts[first : first + setting.batch_size]]
            batch = left_padded(encoded, self.tokenizer.pad_token_id)
            streamer = self.announce(prompts[first], setting) if first in shown else None
            start = time.perf_counter()
            ids = self.model.generate(
                **batch, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer, **kwargs
            )
            seconds += time.perf_counter() - start
            rows = [without_padding(row, self.tokenizer) for row in ids[:, batch["input_ids"].shape[1] :].tolist()]
            outputs += rows
            if stats is None:
                num_passes += max(map(len, rows))  # a token of every row per pass
            else:
                stats += self.model.speculation_stats
                num_passes = stats.target_forwards
        return Run(setting, outputs, seconds, num_passes, stats)

    def announce(self, prompt: Prompt, setting: Setting) -> TextStreamer:
        """Names a prompt, and gives what writes its answer as it comes."""
        title = textwrap.shorten(prompt.turns[0], 70, placeholder=" …")
        self.console.rule(escape(f"{setting.name}; {prompt.category}: {title}"))
        return TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)


def without_padding(row: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    eos = tokenizer.eos_token_id
    return row[: row.index(eos) + 1] if eos in row else row


def show_table(console: Console, runs: list[Run]) -> None:
    """Speed and equality of every run; a block's texts are compared to those of its first run."""
    table = Table(title="SmolLM2-135M, greedy, fp32; prompt lookup with tuned layers")
    for name in ("batch", "penalties", "drafting", "tokens/s", "speed-up", "tokens/round", "passes", "same text"):
        table.add_column(name, justify="right")
    for block in BLOCKS:
        runs_of_block = [run for run in runs if run.setting.block == block]
        if not runs_of_block:  # somebody stopped it
            break
        baseline = max(run.tokens_per_second for run in runs_of_block if run.stats is None)
        for run in runs_of_block:
            num_equal = sum(a == b for a, b in zip(run.outputs, runs_of_block[0].outputs))
            table.add_row(
                str(run.setting.batch_size),
                "on" if run.setting.has_penalties else "off",
                run.setting.name,
                f"{run.tokens_per_second:.1f}",
                f"{run.tokens_per_second / baseline:.2f}x",
                "" if run.stats is None else f"{run.stats.mean_accepted_length:.2f}",
                str(run.num_passes),
                f"{num_equal}/{len(run.outputs)}",
                end_section=run is runs_of_block[-1],
            )
    if runs:
        console.print(table)
    if len(runs) == len(SETTINGS):
        console.print(CLOSING)
