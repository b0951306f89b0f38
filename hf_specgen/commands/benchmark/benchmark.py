"""
Speculative against plain and stock assisted generation, all measured in one run:

    python scripts/benchmark.py --categories code_editing --num_lookup_tokens 8 --batch_sizes 1 4 --tune_linears
    python scripts/benchmark.py --model Qwen/Qwen3-4B --draft_model deepseek-ai/dspark_qwen3_4b_block7
    python scripts/benchmark.py --model small --prompt_limit 24 --draft_noise 0.3 --cases speculation ragged batching
    torchrun --nproc-per-node 2 scripts/benchmark.py --model small --draft_noise 0.3
    torchrun --nproc-per-node 2 scripts/benchmark.py --model small --cases evaluation --num_threads 1
    accelerate launch --num_processes 2 scripts/benchmark.py --model my/target --draft_model my/draft \
        --prompts openai/gsm8k/main:question --prompt_limit 64 --do_sample --temperature 0.7

`torchrun` starts processes on a CPU, either command does on GPUs. They share the prompts, and tokens per second are
those of all together; attention, overhead and processors are measured on the main process while the others wait.
Prints a table, and as the last line of stdout one JSON object, which `--output` also writes to a file.
"""

import json
import os
import platform
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser, PreTrainedTokenizerBase, set_seed

from hf_specgen import DecodingStats, DSparkModel, __version__, tune_linears
from hf_specgen.dspark import check_drafter
from hf_specgen.prompts.sources import encode_prompt, load_prompts

from ..loading import load_draft_model, load_model, noisy_draft
from .cases import (
    Measurement,
    Setting,
    attention_case,
    batching_case,
    overhead_case,
    processors_case,
    ragged_case,
    speculation_case,
)
from .evaluation_cases import evaluation_case
from .serving_cases import serving_case, streaming_case

CASES = (
    "speculation",
    "ragged",
    "batching",
    "serving",
    "evaluation",
    "streaming",
    "attention",
    "overhead",
    "processors",
)
DEFAULT_NUM_ASSISTANT_TOKENS = 5


@dataclass
class BenchmarkArguments:
    model: str = field(default="smollm2", metadata={"help": "'smollm2', 'small', a folder or a hub name."})
    tokenizer: str | None = field(
        default=None, metadata={"help": "Where it is not the model's own; 'bytes' for none."}
    )
    draft_model: str | None = field(
        default=None, metadata={"help": "A DSpark drafter in any layout, or a smaller model with the same tokenizer."}
    )
    draft_noise: float | None = field(
        default=None, metadata={"help": "Draft with a copy of the target whose head is disturbed by this much."}
    )
    num_lookup_tokens: int = field(default=8, metadata={"help": "Candidates per round by prompt lookup (no draft)."})
    num_assistant_tokens: int | None = field(
        default=None,
        metadata={"help": f"Candidates per round of a draft; by default {DEFAULT_NUM_ASSISTANT_TOKENS}, or a block."},
    )
    confidence_threshold: float = field(
        default=0.0, metadata={"help": "A DSpark drafter's candidates count up to the first with less confidence."}
    )
    prompts: str = field(default="builtin", metadata={"help": "'builtin', a .jsonl file or a data set[:column]."})
    categories: list[str] | None = field(default=None, metadata={"help": "Kinds of built-in prompts."})
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
        if unknown := set(self.cases) - set(CASES):
            raise ValueError(f"`cases` has to name some of {CASES}, but names {sorted(unknown)}.")
        if self.repeats < 1:
            raise ValueError(f"`repeats` has to be at least 1, but is {self.repeats}.")
        if min(self.batch_sizes) < 1:
            raise ValueError(f"`batch_sizes` have to be at least 1, but are {self.batch_sizes}.")
        if self.temperature != 1.0 and not self.do_sample:
            raise ValueError(f"`temperature` needs `do_sample`, but is {self.temperature} without it.")
        has_draft = self.draft_model is not None or self.draft_noise is not None
        if self.num_assistant_tokens is not None and not has_draft:
            raise ValueError(
                f"`num_assistant_tokens` needs `draft_model` or `draft_noise`, but is {self.num_assistant_tokens} "
                "without either. `num_lookup_tokens` is for prompt lookup."
            )
        if self.draft_noise is not None and self.num_assistant_tokens is None:
            self.num_assistant_tokens = DEFAULT_NUM_ASSISTANT_TOKENS


def main() -> None:
    (args,) = HfArgumentParser(BenchmarkArguments).parse_args_into_dataclasses()
    transformers.logging.set_verbosity_error()
    state = start_processes()
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    set_seed(args.seed)
    model, tokenizer = load_model(args.model, args.tokenizer)
    model.to(state.device)
    texts = load_prompts(args.prompts, args.categories, args.prompt_limit)
    start = 0 if args.max_prompt_tokens is None else -args.max_prompt_tokens
    prompts = [encode_prompt(tokenizer, prompt.turns)[start:] for prompt in texts]
    with state.split_between_processes(prompts) as share:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0} if args.do_sample else {}
        setting = Setting(
            model,
            share,
            {"max_new_tokens": args.max_new_tokens, "do_sample": False} | sampling,
            args.repeats,
            tokenizer.pad_token_id or 0,
            state.is_main_process,
        )
    draft_kwargs = make_draft_kwargs(args, setting)
    result = check_draft_model(draft_kwargs, setting, tokenizer) | run_cases(
        args, setting, tokenizer, draft_kwargs, state
    )
    if state.is_main_process:
        report = {"settings": asdict(args), "environment": environment(state), **result}
        print_tables(report)
        if args.output is not None:
            Path(args.output).parent.mkdir(parents=True, exist_ok=True)
            Path(args.output).write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(report))
    state.destroy_process_group()


def start_processes() -> PartialState:
    """This process among those that were started; by themselves they would not find each other on a CPU."""
    state = PartialState(cpu=not torch.cuda.is_available())
    num_started = int(os.environ.get("WORLD_SIZE", 1))
    if num_started != state.num_processes:
        raise ValueError(
            f"`WORLD_SIZE` has to be the number of processes that found each other, but is {num_started} instead of "
            f"{state.num_processes}. Start them with `torchrun` or `accelerate launch`."
        )
    return state


def run_cases(
    args: BenchmarkArguments,
    setting: Setting,
    tokenizer: PreTrainedTokenizerBase,
    draft_kwargs: dict[str, Any],
    state: PartialState,
) -> dict[str, Any]:
    """The results of every case asked for: the first five of all processes, the others of the main one."""
    largest = max(args.batch_sizes)
    result: dict[str, Any] = {}
    if "speculation" in args.cases:
        lines = [speculation_case(setting, size, draft_kwargs, args.tune_linears) for size in args.batch_sizes]
        result["speculation"] = merged([line for lines_of_size in lines for line in lines_of_size])
    if "ragged" in args.cases:
        result["ragged"] = merged(ragged_case(setting, largest))
    if "batching" in args.cases:
        result["batching"] = merged(batching_case(setting, largest, draft_kwargs))
    if "serving" in args.cases:
        drafting = {name: value for name, value in serving_drafter(args, draft_kwargs).items() if value is not None}
        result["serving"] = merged(serving_case(setting, tokenizer, largest, drafting))
    if "evaluation" in args.cases:
        result["evaluation"] = evaluation_case(setting, tokenizer)
    if state.is_main_process:
        if "streaming" in args.cases:
            result["streaming"] = streaming_case(setting, tokenizer)
        if "attention" in args.cases:
            result["attention"] = [{"linears": "stock", **entry} for entry in attention_case(setting)]
            if args.tune_linears:
                with tune_linears(setting.model):
                    result["attention"] += [{"linears": "tuned", **entry} for entry in attention_case(setting)]
        if "overhead" in args.cases:
            result["overhead"] = overhead_case(setting, draft_kwargs)
        if "processors" in args.cases:
            result["processors_ms"] = processors_case(args.repeats)
    state.wait_for_everyone()
    return result


def make_draft_kwargs(args: BenchmarkArguments, setting: Setting) -> dict[str, Any]:
    """What to give to `generate` for speculation, the same to transformers and to us."""
    if args.draft_model is not None:
        draft = load_draft_model(args.draft_model, setting.model)
    elif args.draft_noise is not None:
        draft = noisy_draft(setting.model, args.draft_noise)
    else:
        return {"prompt_lookup_num_tokens": args.num_lookup_tokens}
    # transformers reads these from the draft's configuration only
    own = draft.generation_config
    own.num_assistant_tokens_schedule = "constant"
    own.assistant_confidence_threshold = 0.0
    if isinstance(draft, DSparkModel):
        draft.confidence_threshold = args.confidence_threshold
    if args.num_assistant_tokens is not None or not isinstance(draft, DSparkModel):
        own.num_assistant_tokens = args.num_assistant_tokens or DEFAULT_NUM_ASSISTANT_TOKENS
    return {"assistant_model": draft}


def serving_drafter(args: BenchmarkArguments, draft_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The settings of a backend that drafts as `draft_kwargs` makes `generate` do."""
    draft = draft_kwargs.get("assistant_model")
    count = args.num_lookup_tokens if draft is None else args.num_assistant_tokens
    return {"draft_model": draft, "num_assistant_tokens": count}


def check_draft_model(
    draft_kwargs: dict[str, Any], setting: Setting, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """What a DSpark drafter's own check says of it, on the main process."""
    draft = draft_kwargs.get("assistant_model")
    if not setting.is_main or not isinstance(draft, DSparkModel):
        return {}
    return {"drafter_check": asdict(check_drafter(draft, setting.model, tokenizer))}


def merged(lines: list[Measurement]) -> list[dict[str, Any]]:
    """The lines of all processes added up, with the speed-up over the first line of the same batch size."""
    results = [total_of(parts).to_dict() for parts in zip(*gather_object([lines]))]
    baselines: dict[int, float] = {}
    for entry in results:
        baseline = baselines.setdefault(entry["batch_size"], entry["tokens_per_second"])
        entry["speedup"] = entry["tokens_per_second"] / baseline
    return results


def total_of(parts: tuple[Measurement, ...]) -> Measurement:
    """One line of all processes: all tokens, the slowest process's time. One without prompts has no statistics."""
    num_equal = [part.num_equal for part in parts if part.num_equal is not None]
    prefill_seconds = [part.prefill_seconds for part in parts if part.prefill_seconds is not None]
    stats = [part.stats for part in parts if part.stats is not None]
    return replace(
        parts[0],
        tokens=sum(part.tokens for part in parts),
        seconds=max(part.seconds for part in parts),
        num_equal=sum(num_equal) if num_equal else None,
        num_prompts=sum(part.num_prompts for part in parts),
        prefill_seconds=max(prefill_seconds, default=None),
        largest_gap=max(part.largest_gap for part in parts),
        stats=sum(stats, DecodingStats()) if stats else None,
    )


def environment(state: PartialState) -> dict[str, Any]:
    """Hardware and versions."""
    is_cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if is_cuda else cpu_name(),
        "num_threads": torch.get_num_threads(),
        "num_processes": state.num_processes,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_specgen": __version__,
    }


def cpu_name() -> str:
    """The processor's model name where Linux tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def print_tables(report: dict[str, Any]) -> None:
    """What a person reads."""
    console = Console(width=130)
    environment = report["environment"]
    console.print(
        f"{report['settings']['model']} on {environment['device']}, {environment['num_threads']} threads x "
        f"{environment['num_processes']} processes, torch {environment['torch']}, "
        f"transformers {environment['transformers']}"
    )
    if "drafter_check" in report:
        for name, length in report["drafter_check"]["alternatives"].items():
            console.print(f"check of the drafter: {length:.2f} tokens per round with {name}")
        for finding in report["drafter_check"]["findings"]:
            console.print(f"check of the drafter: {finding}")
    for case in ("speculation", "ragged", "batching", "serving"):
        if case in report:
            console.print(measurement_table(case, report[case]))
    for line in report.get("speculation", []):
        if line["name"] == "speculative":
            console.print(position_table(line))
    for entry in report.get("attention", []):
        console.print(
            f"{entry['new_positions']} positions over {entry['cached_tokens']} cached, {entry['linears']} linears: "
            f"sdpa {entry['sdpa_ms']:.1f} ms, grouped {entry['grouped_ms']:.1f} ms ({entry['speedup']:.2f}x, largest "
            f"difference {entry['max_difference']:.1e})"
        )
    if "evaluation" in report:
        console.print(evaluation_table(report["evaluation"]))
    if "streaming" in report:
        times = ", ".join(f"{us:.1f} of {count}" for count, us in report["streaming"]["assembly_us_per_token"].items())
        console.print(
            f"streaming adds {report['streaming']['streaming_overhead']:+.1%}; text takes us per token: {times} tokens"
        )
    if "processors_ms" in report:
        times = ", ".join(f"{name} {ms:.2f}" for name, ms in report["processors_ms"].items())
        console.print(f"penalties over 8 rows x 4,096 tokens x 151,936 ids, ms: {times}")
    if "overhead" in report:
        share = report["overhead"]["processors_verification_bookkeeping_share"]
        text = "not measured" if share is None else f"{share:.1%} of the time"
        console.print(f"processors, verification and bookkeeping at batch 1 with penalties: {text}")


def measurement_table(title: str, lines: list[dict[str, Any]]) -> Table:
    table = Table(title=title)
    names = ("batch", "what", "tokens/s", "speed-up", "decode only", "equal ids", "tokens/round", "kept by position")
    for name in names:
        table.add_column(name, justify="left" if name == "what" else "right", no_wrap=name == "what")
    for line in lines:
        stats, decode, gap = line["stats"] or {}, line["decode_tokens_per_second"], line["largest_gap"]
        equal = "" if line["num_equal"] is None else f"{line['num_equal']}/{line['num_prompts']}"
        table.add_row(
            str(line["batch_size"]),
            line["name"],
            f"{line['tokens_per_second']:.1f}",
            f"{line['speedup']:.2f}x",
            "" if decode is None else f"{decode:.1f}",
            equal + (f" (gap {gap:.0e})" if gap else ""),
            f"{stats['mean_accepted_length']:.2f}" if stats.get("drafting_rounds") else "",
            " ".join(f"{share:.1f}" for share in stats.get("survival", [])[:8]),
        )
    return table


def evaluation_table(result: dict[str, Any]) -> Table:
    """Ways to generate an evaluation's texts."""
    table = Table(title=f"evaluation: {result['num_prompts']} prompts x {result['num_new_tokens']} tokens")
    for name in ("what", "seconds", "CPU seconds", "of the first", "equal texts"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for name, seconds in result["seconds"].items():
        share, num_equal = result["share_of_baseline"][name], result["num_equal"][name]
        cpu = f"{result['cpu_seconds'][name]:.2f}"
        table.add_row(name, f"{seconds:.2f}", cpu, f"{share:.2f}x", f"{num_equal}/{result['num_prompts']}")
    return table


def position_table(line: dict[str, Any]) -> Table:
    """How candidates fared by their place in the block."""
    stats = line["stats"]
    title = f"candidates by position, batch {line['batch_size']}: {stats['mean_accepted_length']:.2f} tokens per round"
    table = Table(title=title)
    for name in ("position", "proposed", "kept", "kept of proposed", "kept if those before are"):
        table.add_column(name, justify="right")
    rows = zip(stats["proposed"], stats["accepted"], stats["survival"], stats["conditional_acceptance"])
    for position, (proposed, accepted, survival, conditional) in enumerate(rows, start=1):
        table.add_row(str(position), str(proposed), str(accepted), f"{survival:.3f}", f"{conditional:.3f}")
    return table


if __name__ == "__main__":
    main()
