"""
Speculative against plain and stock assisted generation, all measured in one run:

    python scripts/benchmark.py --categories code_editing --num_lookup_tokens 8 --batch_sizes 1 4 --tune_linears
    python scripts/benchmark.py --model Qwen/Qwen3-4B --draft_model deepseek-ai/dspark_qwen3_4b_block7
    python scripts/benchmark.py --model small --prompt_limit 24 --draft_noise 0.3 --cases speculation ragged batching
    torchrun --nproc-per-node 2 scripts/benchmark.py --model small --draft_noise 0.3
    torchrun --nproc-per-node 2 scripts/benchmark.py --model small --cases evaluation --num_threads 1
    accelerate launch --num_processes 2 scripts/benchmark.py --model my/target --draft_model my/draft \\
        --prompts openai/gsm8k/main:question --prompt_limit 64 --do_sample --temperature 0.7

`torchrun` starts processes on a CPU, either command does on GPUs. They share the prompts, and tokens per second are
those of all together; attention, overhead and processors are measured on the main process while the others wait.
Each table is printed, and written to `--output`, when its case ends; the last line of stdout is one JSON object with
all of them.
"""

from dataclasses import dataclass, field

from .checks import (
    EMBEDDED,
    MODEL_HELP,
    TOKENIZER_HELP,
    check_counts,
    check_excludes,
    check_needs,
    check_output_file,
    check_sampling,
    check_seed,
    check_threshold,
    check_tokenizer,
)

# In the order in which they run. The second group is measured on the main process alone.
SHARED_CASES = ("speculation", "ragged", "batching", "serving", "evaluation")
CASES = (*SHARED_CASES, "streaming", "attention", "overhead", "processors")
DEFAULT_NUM_LOOKUP_TOKENS, DEFAULT_NUM_ASSISTANT_TOKENS = 8, 5


@dataclass
class BenchmarkArguments:
    model: str = field(default=EMBEDDED, metadata={"help": MODEL_HELP})
    tokenizer: str | None = field(default=None, metadata={"help": TOKENIZER_HELP})
    draft_model: str | None = field(
        default=None, metadata={"help": "A DSpark drafter in any layout, or a smaller model with the same tokenizer."}
    )
    draft_noise: float | None = field(
        default=None, metadata={"help": "Draft with a copy of the target whose head is disturbed by this much."}
    )
    num_lookup_tokens: int | None = field(
        default=None,
        metadata={"help": f"Candidates per round by prompt lookup (no draft), {DEFAULT_NUM_LOOKUP_TOKENS} if None."},
    )
    num_assistant_tokens: int | None = field(
        default=None,
        metadata={"help": f"Candidates per round of a draft; by default {DEFAULT_NUM_ASSISTANT_TOKENS}, or a block."},
    )
    confidence_threshold: float | None = field(
        default=None, metadata={"help": "A DSpark drafter's candidates count up to the first with less confidence."}
    )
    prompts: str = field(default="builtin", metadata={"help": "'builtin', a .jsonl file or a data set[:column]."})
    categories: list[str] | None = field(default=None, metadata={"help": "Kinds of prompts, of those in `prompts`."})
    prompt_limit: int = field(default=8, metadata={"help": "How many prompts."})
    max_prompt_tokens: int | None = field(default=None, metadata={"help": "Keep only the end of longer prompts."})
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4], metadata={"help": "Rows side by side."})
    max_new_tokens: int = field(default=64, metadata={"help": "The most tokens per prompt."})
    do_sample: bool = field(default=False, metadata={"help": "Sample instead of taking the best token."})
    temperature: float = field(default=1.0, metadata={"help": "Divides the scores when sampling."})
    cases: list[str] = field(default_factory=lambda: ["speculation"], metadata={"help": f"Some of {CASES}."})
    tune_linears: bool = field(default=False, metadata={"help": "Also measure with tuned linear layers (CPU)."})
    repeats: int = field(default=3, metadata={"help": "Timed repetitions; the median counts."})
    num_threads: int | None = field(default=None, metadata={"help": "CPU threads of torch."})
    seed: int = field(default=0, metadata={"help": "Seeds torch."})
    output: str | None = field(default=None, metadata={"help": "Where to write the JSON."})

    def __post_init__(self) -> None:
        if not self.cases or set(self.cases) - set(CASES):
            raise ValueError(f"`--cases` has to name some of {CASES}, but is {self.cases}.")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"`--batch_sizes` have to be at least 1, but are {self.batch_sizes}.")
        check_counts(self, "prompt_limit", "max_prompt_tokens", "max_new_tokens", "repeats", "num_threads")
        check_counts(self, "num_lookup_tokens", "num_assistant_tokens")
        check_excludes(self, "draft_model", "draft_noise", "num_lookup_tokens")
        check_needs(self, "num_assistant_tokens", "draft_model", "draft_noise")
        check_needs(self, "confidence_threshold", "draft_model")
        check_threshold("confidence_threshold", self.confidence_threshold)
        if self.draft_noise is not None and not 0 <= self.draft_noise < float("inf"):
            raise ValueError(f"`--draft_noise` has to be a number of at least 0, but is {self.draft_noise}.")
        check_sampling(self)
        check_seed(self)
        check_tokenizer(self, self.model)
        check_output_file("output", self.output)
        if self.draft_noise is not None and self.num_assistant_tokens is None:
            self.num_assistant_tokens = DEFAULT_NUM_ASSISTANT_TOKENS
        if self.draft_model is None and self.draft_noise is None and self.num_lookup_tokens is None:
            self.num_lookup_tokens = DEFAULT_NUM_LOOKUP_TOKENS
