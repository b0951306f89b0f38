"""
Calibrates the confidence of a DSpark drafter for a target, once per way of decoding:

    python scripts/calibrate_dspark.py --target Qwen/Qwen3-4B --drafter my/dspark --prompts openai/gsm8k/main:question
    torchrun --nproc-per-node 2 scripts/calibrate_dspark.py --target my/target --drafter my/dspark --prompts my.jsonl
    accelerate launch --num_processes 8 scripts/calibrate_dspark.py --target Qwen/Qwen3-4B --drafter my/dspark \
        --prompts openai/gsm8k/main:question --prompt_limit 512 --do_sample --temperature 0.7

Every block is proposed and verified whole. Temperatures are fitted on the blocks of one half of the prompts and
measured on those of the other half. They are written beside the checkpoint, where loading the drafter finds them, with
a reliability diagram. Prints a table, and as the last line of stdout one JSON object.
"""

import json
import random
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import (
    HfArgumentParser,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    set_seed,
)

from hf_specgen import Decoder, DecodingRules, DSparkDrafter, DSparkModel, Request
from hf_specgen.dspark.calibration import Calibration, ConfidenceRecorder, ConfidenceRecords, calibrate
from hf_specgen.dspark.reliability_plot import plot_reliability
from hf_specgen.engine.model_facts import eos_ids
from hf_specgen.prompts.sources import encode_prompt, load_prompts

from .benchmark.benchmark import start_processes
from .loading import load_model


@dataclass
class CalibrateArguments:
    target: str = field(metadata={"help": "The target: a folder or a hub name."})
    drafter: str = field(metadata={"help": "Its DSpark drafter, with a confidence head: a folder or a hub name."})
    tokenizer: str | None = field(
        default=None, metadata={"help": "Where it is not the target's own; 'bytes' for none."}
    )
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
        if (self.temperature, self.top_k) != (1.0, 0) and not self.do_sample:
            raise ValueError(
                f"`temperature` and `top_k` need `do_sample`, but are {self.temperature} and {self.top_k} without it."
            )
        if self.temperature <= 0 or self.top_k < 0:
            raise ValueError(
                f"`temperature` has to be above 0 and `top_k` at least 0, but are {self.temperature} and {self.top_k}."
            )
        if self.output is None:
            if not Path(self.drafter).is_dir():
                raise ValueError(f"`drafter` is not a folder to write to ({self.drafter!r}): give `output`.")
            self.output = self.drafter
        if self.plot and find_spec("matplotlib") is None:
            raise ValueError("`plot` needs matplotlib: `pip install matplotlib`, or give `--plot ''`.")

    @property
    def folder(self) -> Path:
        """Where to write."""
        assert self.output is not None, "set when the arguments were read"
        return Path(self.output)

    @property
    def decoding(self) -> dict[str, Any]:
        """The settings that the calibration holds for."""
        sampling = {"temperature": self.temperature, "top_k": self.top_k}
        return {"do_sample": self.do_sample} | (sampling if self.do_sample else {})


def main() -> None:
    (args,) = HfArgumentParser(CalibrateArguments).parse_args_into_dataclasses()
    transformers.logging.set_verbosity_error()
    state = start_processes()
    set_seed(args.seed)
    target, tokenizer = load_model(args.target, args.tokenizer)
    target.to(state.device)
    drafter_model = load_drafter(args.drafter).to(state.device)
    fit_requests, held_out_requests = make_requests(args, target, tokenizer)
    fit_records = record(target, drafter_model, fit_requests, args.batch_size, "fit")
    held_out_records = record(target, drafter_model, held_out_requests, args.batch_size, "held out")
    if state.is_main_process:
        fit, held_out = map(ConfidenceRecords.concatenate, (fit_records, held_out_records))
        calibration = calibrate(fit, held_out, args.prompts, args.decoding)
        report = {"file": str(calibration.save(args.folder)), "num_held_out": len(held_out), **asdict(calibration)}
        if args.plot:
            plot_reliability(held_out, calibration, args.folder / args.plot)
            report["plot"] = str(args.folder / args.plot)
        print_table(calibration, held_out)
        print(json.dumps(report))
    state.destroy_process_group()


def load_drafter(name: str) -> DSparkModel:
    """The drafter, if it has a confidence to calibrate."""
    model = DSparkModel.from_pretrained(name, dtype="auto").eval()
    if not model.config.enable_confidence_head:
        raise ValueError(f"`drafter` has to have a confidence head, but {name!r} has none.")
    return model


def make_requests(
    args: CalibrateArguments, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Request], list[Request]]:
    """Those to fit and those to measure on; shuffled before, since prompts of a kind may take turns."""
    prompts = load_prompts(args.prompts, limit=args.prompt_limit)
    if len(prompts) < 2:
        raise ValueError("`prompts` has to hold at least 2 prompts, one to fit and one to measure on, but holds 1.")
    random.Random(args.seed).shuffle(prompts)
    processors: list = [TemperatureLogitsWarper(args.temperature)] if args.temperature != 1.0 else []
    processors += [TopKLogitsWarper(args.top_k)] if args.top_k else []
    rules = DecodingRules(
        LogitsProcessorList(processors),
        eos_token_ids=eos_ids(target.generation_config.eos_token_id),
        do_sample=args.do_sample,
    )
    requests = [
        Request(encode_prompt(tokenizer, prompt.turns), args.max_new_tokens, rules, seed=args.seed + number)
        for number, prompt in enumerate(prompts)
    ]
    return requests[::2], requests[1::2]


def record(
    target: PreTrainedModel, drafter_model: DSparkModel, requests: list[Request], batch_size: int, name: str
) -> list[ConfidenceRecords]:
    """Decodes the requests on all processes and gives each the records of all of them, in parts."""
    state = PartialState()
    drafter = DSparkDrafter(drafter_model, keep_confidence=True)
    recorder = ConfidenceRecorder(drafter)
    decoder = Decoder(target, drafter, max_batch_size=batch_size, on_round=recorder)
    with state.split_between_processes(requests) as share:
        progress = tqdm(total=len(share), desc=f"{name}, prompts", disable=not state.is_main_process)
        for progressed in decoder.run(share):
            progress.update(sum(request.finish_reason is not None for request in progressed))
        progress.close()
    return gather_object([recorder.records()] if recorder.parts else [])


def print_table(calibration: Calibration, held_out: ConfidenceRecords) -> None:
    """What a person reads."""
    table = Table(title="Confidence that everything up to a position is kept, before -> after, on held-out prompts")
    for name in ("position", "blocks", "kept", "temperature", "ECE", "AUROC", "Brier"):
        table.add_column(name, justify="right")
    for position, temperature in enumerate(calibration.temperatures):
        judged = held_out.is_judged[:, position]
        table.add_row(
            str(position + 1),
            str(int(judged.sum())),
            f"{held_out.labels[judged, position].double().mean():.1%}",
            f"{temperature:.2f}",
            change(calibration.ece_before[position], calibration.ece_after[position]),
            change(calibration.auroc_before[position], calibration.auroc_after[position]),
            change(calibration.brier_before[position], calibration.brier_after[position]),
        )
    if sum(calibration.ece_after) >= sum(calibration.ece_before):
        table.caption = (
            "The error did not fall on held-out prompts: the confidence needs no temperatures, or there are too few "
            "blocks to find them."
        )
    Console(width=110).print(table)


def change(before: float | None, after: float | None) -> str:
    return "" if before is None or after is None else f"{before:.4f} -> {after:.4f}"


if __name__ == "__main__":
    main()
