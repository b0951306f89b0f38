"""
Measures what a verification pass costs by its number of tokens, for `ThroughputScheduler`:

    python scripts/profile_step_costs.py --model smollm2
    python scripts/profile_step_costs.py --model small --num_rows 4 --max_positions 8 --output costs.json
    accelerate launch --num_processes 1 scripts/profile_step_costs.py --model my/target --num_rows 8

Measure where and with as many rows as will be decoded side by side. Prints a table, writes the costs to `--output`
for `StepCosts.load`, and prints one JSON object as the last line of stdout.
"""

from dataclasses import dataclass, field

from .checks import EMBEDDED, MODEL_HELP, check_counts, check_output_file


@dataclass
class ProfileArguments:
    model: str = field(default=EMBEDDED, metadata={"help": MODEL_HELP})
    num_rows: int = field(default=1, metadata={"help": "Rows side by side."})
    max_positions: int = field(default=16, metadata={"help": "The most new positions per row: candidates and one."})
    context_length: int = field(default=256, metadata={"help": "Cached tokens per row."})
    repeats: int = field(default=5, metadata={"help": "Timed repetitions; the median counts."})
    num_threads: int | None = field(default=None, metadata={"help": "CPU threads of torch."})
    output: str = field(default="step_costs.json", metadata={"help": "Where to write the costs."})

    def __post_init__(self) -> None:
        check_counts(self, "num_rows", "max_positions", "context_length", "repeats", "num_threads")
        check_output_file("output", self.output)
