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
from loading import encode_prompt, left_padded, load_model
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen import DecodingStats, TokenPenalties, enable_speculation
from hf_specgen.cpu_linear import tune_linears
from hf_specgen.prompts import Prompt, load_prompts

CATEGORIES = {"code_editing": 4, "summarisation": 2, "chat": 2}
LOOKUPS = (None, 4, 8)  # candidates per round; None is plain decoding


@dataclass
class DemoArguments:
    max_new_tokens: int = field(default=48, metadata={"help": "The most tokens per prompt."})
    num_shown: int = field(default=3, metadata={"help": "How many answers to print."})


@dataclass(frozen=True)
class Run:
    """One pass over all prompts."""

    batch_size: int
    has_penalties: bool
    num_lookup_tokens: int | None
    outputs: list[list[int]]
    seconds: float
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
    tuning = tune_linears(model)
    console.print(f"Tuned {len(tuning.modules)} linear layers for few rows at {tuning.num_threads} threads.\n")
    prompts = [
        prompt for category, limit in CATEGORIES.items() for prompt in load_prompts("builtin", [category], limit)
    ]
    settings = [(size, penalised, k) for size in (1, 4) for penalised in (False, True) for k in LOOKUPS]
    runs = [decode(model, tokenizer, prompts, args, setting) for setting in tqdm(settings, desc="runs")]
    show_texts(console, tokenizer, prompts[:: len(prompts) // args.num_shown], prompts, runs)
    show_table(console, runs)


def decode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    args: DemoArguments,
    setting: tuple[int, bool, int | None],
) -> Run:
    """Decodes all prompts with one setting; what follows the end of an answer is dropped."""
    batch_size, has_penalties, num_lookup_tokens = setting
    kwargs: dict = {} if num_lookup_tokens is None else {"prompt_lookup_num_tokens": num_lookup_tokens}
    if has_penalties:
        kwargs["logits_processor"] = [TokenPenalties(1.05, 0.05, 0.0, pad_token_id=tokenizer.pad_token_id)]
    outputs: list[list[int]] = []
    stats = None if num_lookup_tokens is None else DecodingStats()
    start = time.perf_counter()
    for first in range(0, len(prompts), batch_size):
        encoded = [encode_prompt(tokenizer, prompt.turns) for prompt in prompts[first : first + batch_size]]
        batch = left_padded(encoded, tokenizer.pad_token_id)
        ids = model.generate(**batch, max_new_tokens=args.max_new_tokens, do_sample=False, **kwargs)
        for row in ids[:, batch["input_ids"].shape[1] :].tolist():
            eos = tokenizer.eos_token_id
            outputs.append(row[: row.index(eos) + 1] if eos in row else row)
        if stats is not None:
            stats += model.speculation_stats
    return Run(batch_size, has_penalties, num_lookup_tokens, outputs, time.perf_counter() - start, stats)


def show_texts(
    console: Console,
    tokenizer: PreTrainedTokenizerBase,
    shown: list[Prompt],
    prompts: list[Prompt],
    runs: list[Run],
) -> None:
    """Some answers: the plain one and the speculative one next to each other."""
    plain, speculative = runs[0], runs[len(LOOKUPS) - 1]
    for prompt in shown:
        index = prompts.index(prompt)
        console.rule(f"{prompt.category}: {textwrap.shorten(prompt.turns[0], 70)}")
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(ratio=1)
        table.add_column(ratio=1)
        texts = [tokenizer.decode(run.outputs[index], skip_special_tokens=True) for run in (plain, speculative)]
        table.add_row("[bold]plain[/bold]", "[bold]speculative[/bold]")
        table.add_row(*(text.replace("[", r"\[") for text in texts))
        console.print(table)


def show_table(console: Console, runs: list[Run]) -> None:
    """Speed and equality of every run; the baseline of each block is its plain run."""
    table = Table(title="SmolLM2-135M, greedy, fp32, tuned linear layers")
    for name in ("batch", "penalties", "drafting", "tokens/s", "speed-up", "tokens/round", "passes", "same text"):
        table.add_column(name, justify="right")
    for run in runs:
        plain = next(r for r in runs if (r.batch_size, r.has_penalties) == (run.batch_size, run.has_penalties))
        num_equal = sum(a == b for a, b in zip(run.outputs, plain.outputs))
        table.add_row(
            str(run.batch_size),
            "on" if run.has_penalties else "off",
            "plain" if run.num_lookup_tokens is None else f"prompt lookup {run.num_lookup_tokens}",
            f"{run.tokens_per_second:.1f}",
            f"{run.tokens_per_second / plain.tokens_per_second:.2f}x",
            "" if run.stats is None else f"{run.stats.mean_accepted_length:.2f}",
            "" if run.stats is None else str(run.stats.target_forwards),
            f"{num_equal}/{len(run.outputs)}",
            end_section=run.num_lookup_tokens == LOOKUPS[-1],
        )
    console.print(table)
    console.print("Speed-up is over plain decoding with the same tuned layers. Other models and machines differ.")


if __name__ == "__main__":
    main()
