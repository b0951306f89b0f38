"""
Trains a tiny model to write dates, and shows what it writes as it learns. Under a minute on one CPU core:

    python scripts/train_with_generation_eval.py
    torchrun --nproc-per-node 2 scripts/train_with_generation_eval.py
    accelerate launch --num_processes 1 scripts/train_with_generation_eval.py --max_steps 1000 --backend speculative

It needs no download: "5th of March 1987 is" goes on with " 1987-03-05", and the model reads bytes. The best model is
the one that writes most dates right, not the one of the lowest loss, and is loaded at the end. `torchrun` starts
processes on a CPU, either command does on GPUs. Prints samples at each evaluation, a table, and as the last line of
stdout one JSON object; draws curves, and keeps all texts as JSONL in `completions`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .checks import check_counts, check_output_file, check_output_folder, check_plot, check_seed

NUM_TEXTS = 8000


@dataclass
class TrainArguments:
    output_dir: str = field(default="train_with_generation_eval", metadata={"help": "Checkpoints, texts and curves."})
    max_steps: int = field(default=400, metadata={"help": "Optimizer steps."})
    eval_steps: int = field(default=40, metadata={"help": "Steps between evaluations."})
    batch_size: int = field(default=32, metadata={"help": "Texts per step and process."})
    learning_rate: float = field(default=2e-3, metadata={"help": "The highest one."})
    num_prompts: int = field(default=128, metadata={"help": "Prompts per evaluation, none of them in training."})
    num_shown: int = field(default=3, metadata={"help": "Texts printed at each evaluation."})
    backend: Literal["batched", "eager", "speculative"] = field(
        default="batched", metadata={"help": "How the texts are generated."}
    )
    seed: int = field(default=0, metadata={"help": "Seeds the model, the texts and their order."})
    plot: str = field(default="curves.png", metadata={"help": "The curves' file in `output_dir`; '' draws none."})

    def __post_init__(self) -> None:
        check_counts(self, "max_steps", "eval_steps", "batch_size")
        if self.max_steps % self.eval_steps:
            raise ValueError(
                "`--max_steps` has to be a multiple of `--eval_steps`, so that the last model is evaluated, but they "
                f"are {self.max_steps} and {self.eval_steps}."
            )
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"`--learning_rate` has to be a number above 0, but is {self.learning_rate}.")
        if not 1 <= self.num_prompts < NUM_TEXTS:
            raise ValueError(f"`--num_prompts` has to be between 1 and {NUM_TEXTS - 1}, but is {self.num_prompts}.")
        if self.num_shown < 0:
            raise ValueError(f"`--num_shown` has to be at least 0, but is {self.num_shown}.")
        check_seed(self)
        check_output_folder("output_dir", self.output_dir)
        check_plot(self)
        if self.plot:
            check_output_file("plot", str(self.folder / self.plot))

    @property
    def folder(self) -> Path:
        """Where everything goes."""
        return Path(self.output_dir).expanduser()

    @property
    def completions(self) -> Path:
        """Where the texts of each evaluation are kept."""
        return self.folder / "completions"
