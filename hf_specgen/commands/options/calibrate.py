"""
Calibrates the confidence of a DSpark drafter for a target, once per way of decoding:

    python scripts/calibrate_dspark.py --target Qwen/Qwen3-4B --drafter my/dspark --prompts openai/gsm8k/main:question
    torchrun --nproc-per-node 2 scripts/calibrate_dspark.py --target my/target --drafter my/dspark --prompts my.jsonl
    accelerate launch --num_processes 8 scripts/calibrate_dspark.py --target Qwen/Qwen3-4B --drafter my/dspark \\
        --prompts openai/gsm8k/main:question --prompt_limit 512 --do_sample --temperature 0.7

Every block is proposed and verified whole. Temperatures are fitted on the blocks of one half of the prompts and
measured on those of the other half. They are written beside the checkpoint, where loading the drafter finds them, with
a reliability diagram. Prints a table, and as the last line of stdout one JSON object.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checks import (
    MODEL_HELP,
    TOKENIZER_HELP,
    check_counts,
    check_output_file,
    check_output_folder,
    check_plot,
    check_sampling,
    check_seed,
    check_tokenizer,
)


@dataclass
class CalibrateArguments:
    target: str = field(metadata={"help": f"The target: {MODEL_HELP}"})
    drafter: str = field(metadata={"help": "Its DSpark drafter, with a confidence head: a folder or a hub name."})
    tokenizer: str | None = field(default=None, metadata={"help": TOKENIZER_HELP})
    prompts: str = field(default="builtin", metadata={"help": "'builtin', a .jsonl file or a data set[:column]."})
    prompt_limit: int | None = field(default=None, metadata={"help": "How many prompts, all by default."})
    max_new_tokens: int = field(default=512, metadata={"help": "The most tokens per prompt."})
    batch_size: int = field(default=8, metadata={"help": "Rows side by side in each process."})
    do_sample: bool = field(default=False, metadata={"help": "Sample instead of taking the best token."})
    temperature: float = field(default=1.0, metadata={"help": "Divides the scores when sampling."})
    top_k: int = field(default=0, metadata={"help": "Sample among the best k only; 0 is all."})
    seed: int = field(default=0, metadata={"help": "Seeds the halves, the requests and torch."})
    output: str | None = field(
        default=None, metadata={"help": "The folder to write to, by default that of the drafter."}
    )
    plot: str = field(
        default="reliability.png", metadata={"help": "The diagram's file in that folder; '' draws none."}
    )

    def __post_init__(self) -> None:
        check_counts(self, "prompt_limit", "max_new_tokens", "batch_size")
        if self.prompt_limit == 1:
            raise ValueError("`--prompt_limit` has to be at least 2, one to fit and one to measure on, but is 1.")
        check_sampling(self)
        check_seed(self)
        check_tokenizer(self, self.target)
        if self.output is None:
            if not Path(self.drafter).is_dir():
                raise ValueError(f"`--drafter` is not a folder to write to ({self.drafter!r}): give `--output`.")
            self.output = self.drafter
        check_output_folder("output", self.output)
        check_plot(self)
        if self.plot:
            check_output_file("plot", str(self.folder / self.plot))

    @property
    def folder(self) -> Path:
        """Where to write."""
        assert self.output is not None, "set when the arguments were read"
        return Path(self.output).expanduser()

    @property
    def decoding(self) -> dict[str, Any]:
        """The settings that the calibration holds for."""
        sampling = {"temperature": self.temperature, "top_k": self.top_k}
        return {"do_sample": self.do_sample} | (sampling if self.do_sample else {})
