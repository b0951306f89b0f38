"""
A real model, decoded plainly and speculatively side by side:

    make demo
    python scripts/demo.py --max_new_tokens 64

Eight built-in prompts on SmolLM2-135M, one by one and in batches of four, with and without penalties. Drafts come from
prompt lookup, which needs no second model: the text is the same, the number of passes is not.
"""

import textwrap
import time
from dataclasses import dataclass, field

import transformers
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen import DecodingStats, TokenPenalties, enable_speculation, tune_linears
from hf_specgen.prompts.sources import Prompt, encode_prompt, load_prompts

from .loading import left_padded, load_model

CATEGORIES = {"code_editing": 4, "summarisation": 2, "chat": 2}
NUM_PROMPTS = sum(CATEGORIES.values())
BATCH_SIZES = (1, 4)
LOOKUPS = (4, 8)  # candidates per round
WARM_UP_TOKENS = 4
CLOSING = (
    "Speed-up is over the faster of the two plain runs of a block. On a CPU of two cores, speculation pays for one "
    "row at a time: a pass has to read all weights anyway, so a few tokens cost little more than one. Four rows with "
    "tuned layers keep the cores nearly busy, every candidate costs time, and a batch waits for its slowest row: "
    "there it pays only where most candidates are kept. Other models and machines differ."
)


@dataclass
class DemoArguments:
    max_new_tokens: int = field(default=40, metadata={"help": "The most tokens per prompt."})
    num_shown: int = field(default=3, metadata={"help": f"How many answers to print, 1 to {NUM_PROMPTS}."})

    def __post_init__(self) -> None:
        if not 1 <= self.num_shown <= NUM_PROMPTS:
            raise ValueError(f"`num_shown` has to be from 1 to {NUM_PROMPTS}, but is {self.num_shown}.")


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


def main() -> None:
    (args,) = HfArgumentParser(DemoArguments).parse_args_into_dataclasses()
    transformers.logging.set_verbosity_error()
    console = Console(width=110)
    console.print("Loading SmolLM2-135M-Instruct (the first time it is converted, which takes half a minute) ...")
    model, tokenizer = load_model("smollm2")
    enable_speculation(model)
    prompts = [
        prompt for category, limit in CATEGORIES.items() for prompt in load_prompts("builtin", [category], limit)
    ]
    runs = decode_all(model, tokenizer, prompts, args.max_new_tokens, STOCK_SETTINGS)
    with tune_linears(model) as tuning:
        console.print(f"Tuned {len(tuning.modules)} linear layers for few rows at {tuning.num_threads} threads.")
        runs += decode_all(model, tokenizer, prompts, args.max_new_tokens, TUNED_SETTINGS)
    runs.sort(key=lambda run: run.setting.block)  # keeps the order within a block: stock, tuned, lookups
    show_texts(console, tokenizer, prompts, runs, args.num_shown)
    show_table(console, runs)


def decode_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    max_new_tokens: int,
    settings: list[Setting],
) -> list[Run]:
    """Decodes all prompts with every setting, after a short warm-up at every batch size."""
    for size in BATCH_SIZES:
        decode(model, tokenizer, prompts[:size], WARM_UP_TOKENS, Setting(size, has_penalties=False))
    return [decode(model, tokenizer, prompts, max_new_tokens, setting) for setting in tqdm(settings, desc="runs")]


def decode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    max_new_tokens: int,
    setting: Setting,
) -> Run:
    """Decodes all prompts with one setting; what follows the end of an answer is dropped."""
    kwargs: dict = {}
    if setting.num_lookup_tokens is not None:
        kwargs["prompt_lookup_num_tokens"] = setting.num_lookup_tokens
    if setting.has_penalties:
        kwargs["logits_processor"] = [TokenPenalties(1.05, 0.05, 0.0, pad_token_id=tokenizer.pad_token_id)]
    outputs: list[list[int]] = []
    num_passes = 0
    stats = None if setting.num_lookup_tokens is None else DecodingStats()
    start = time.perf_counter()
    for first in range(0, len(prompts), setting.batch_size):
        encoded = [encode_prompt(tokenizer, prompt.turns) for prompt in prompts[first : first + setting.batch_size]]
        batch = left_padded(encoded, tokenizer.pad_token_id)
        ids = model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False, **kwargs)
        rows = [without_padding(row, tokenizer) for row in ids[:, batch["input_ids"].shape[1] :].tolist()]
        outputs += rows
        if stats is None:
            num_passes += max(map(len, rows))  # a token of every row per pass
        else:
            stats += model.speculation_stats
            num_passes = stats.target_forwards
    return Run(setting, outputs, time.perf_counter() - start, num_passes, stats)


def without_padding(row: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    eos = tokenizer.eos_token_id
    return row[: row.index(eos) + 1] if eos in row else row


def show_texts(
    console: Console, tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt], runs: list[Run], num_shown: int
) -> None:
    """Some answers: the plain one and the speculative one next to each other."""
    first_block = [run for run in runs if run.setting.block == BLOCKS[0]]
    shown_runs = first_block[0], first_block[-1]
    for index in (number * len(prompts) // num_shown for number in range(num_shown)):
        prompt = prompts[index]
        title = textwrap.shorten(prompt.turns[0], 70, placeholder=" …")
        console.rule(escape(f"{prompt.category}: {title}"))
        table = Table.grid(padding=(0, 2), expand=True)
        for _ in shown_runs:
            table.add_column(ratio=1)
        table.add_row(*(f"[bold]{run.setting.name}[/bold]" for run in shown_runs))
        table.add_row(*(escape(answer(tokenizer, run.outputs[index])) for run in shown_runs))
        console.print(table)


def answer(tokenizer: PreTrainedTokenizerBase, output: list[int]) -> str:
    """The text, with an ellipsis where `max_new_tokens` cut it."""
    text = tokenizer.decode(output, skip_special_tokens=True)
    return text if output[-1] == tokenizer.eos_token_id else f"{text} …"


def show_table(console: Console, runs: list[Run]) -> None:
    """Speed and equality of every run; a block's texts are compared to those of its first run."""
    table = Table(title="SmolLM2-135M, greedy, fp32; prompt lookup with tuned layers")
    for name in ("batch", "penalties", "drafting", "tokens/s", "speed-up", "tokens/round", "passes", "same text"):
        table.add_column(name, justify="right")
    for block in BLOCKS:
        runs_of_block = [run for run in runs if run.setting.block == block]
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
    console.print(table)
    console.print(CLOSING)


if __name__ == "__main__":
    main()
