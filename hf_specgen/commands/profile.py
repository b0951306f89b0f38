"""Measures what passes of a model cost, and keeps it for `ThroughputScheduler`."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from hf_specgen.drafters import StepCosts, profile_step_costs

from .models import load_model
from .options.profile import ProfileArguments
from .processes import environment, start_processes


def main(args: ProfileArguments) -> None:
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
        file = Path(args.output).expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
        costs.save(file)
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
