"""
Measures what a verification pass costs by its number of tokens, for `ThroughputScheduler`:

    python scripts/profile_step_costs.py --model smollm2
    python scripts/profile_step_costs.py --model small --num_rows 4 --max_positions 8 --output costs.json
    accelerate launch --num_processes 1 scripts/profile_step_costs.py --model my/target --num_rows 8

Measure where and with as many rows as will be decoded side by side. Prints a table, writes the costs to `--output`
for `StepCosts.load`, and prints one JSON object as the last line of stdout.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser

from hf_specgen.arguments import check_count
from hf_specgen.drafters.step_costs import StepCosts, profile_step_costs

from .benchmark.benchmark import environment, start_processes
from .loading import load_model


@dataclass
class ProfileArguments:
    model: str = field(default="smollm2", metadata={"help": "'smollm2', 'small', a folder or a hub name."})
    num_rows: int = field(default=1, metadata={"help": "Rows side by side."})
    max_positions: int = field(default=16, metadata={"help": "The most new positions per row: candidates and one."})
    context_length: int = field(default=256, metadata={"help": "Cached tokens per row."})
    repeats: int = field(default=5, metadata={"help": "Timed repetitions; the median counts."})
    num_threads: int | None = field(default=None, metadata={"help": "CPU threads of torch."})
    output: str = field(default="step_costs.json", metadata={"help": "Where to write the costs."})

    def __post_init__(self) -> None:
        for name in ("num_rows", "max_positions", "context_length", "repeats"):
            check_count(name, vars(self)[name])
        if self.num_threads is not None:
            check_count("num_threads", self.num_threads)


def main() -> None:
    (args,) = HfArgumentParser(ProfileArguments).parse_args_into_dataclasses()
    transformers.logging.set_verbosity_error()
    state = start_processes()
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    if state.is_main_process:  # the others wait, so as not to disturb it
        model, _ = load_model(args.model)
        max_tokens = args.num_rows * args.max_positions
        costs = profile_step_costs(
            model.to(state.device), args.num_rows, max_tokens, args.context_length, args.repeats
        )
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        costs.save(args.output)
        print_table(costs)
        print(json.dumps({"settings": asdict(args), "environment": environment(state), "step_costs": asdict(costs)}))
    state.wait_for_everyone()
    state.destroy_process_group()


def print_table(costs: StepCosts) -> None:
    """What a person reads. A pass pays when it yields more tokens per row than its cost over that of one position."""
    table = Table(title=f"{costs.model} on {costs.device}: rows of {costs.context_length} cached tokens")
    for name in ("tokens", "per row", "ms", "ms per token", "cost over 1 per row"):
        table.add_column(name, justify="right")
    base = costs.at(costs.num_rows)
    for num_tokens, ms in costs.milliseconds.items():
        table.add_row(
            str(num_tokens),
            str(num_tokens // costs.num_rows),
            f"{ms:.2f}",
            f"{ms / num_tokens:.2f}",
            f"{ms / base:.2f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
