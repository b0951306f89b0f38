"""Records how often the blocks of a DSpark drafter are kept, and fits its confidence to that."""

import json
import random
from dataclasses import asdict

import transformers
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    set_seed,
)

from hf_specgen import Decoder, DecodingRules, DSparkDrafter, DSparkModel, Request
from hf_specgen.dspark import (
    MIN_RECORDS,
    Calibration,
    ConfidenceRecorder,
    ConfidenceRecords,
    calibrate,
    plot_reliability,
)
from hf_specgen.engine import eos_ids
from hf_specgen.prompts import Prompt, encode_prompt, load_prompts

from .models import load_model, loading
from .options.calibrate import CalibrateArguments
from .processes import start_processes


def main(args: CalibrateArguments) -> None:
    transformers.logging.set_verbosity_error()
    prompts = read_prompts(args)
    state = start_processes()
    set_seed(args.seed)
    target, tokenizer = load_model(args.target, args.tokenizer)
    target.to(state.device)
    drafter_model = load_drafter(args.drafter).to(state.device)
    fit_requests, held_out_requests = make_requests(args, prompts, target, tokenizer)
    check_room(args, len(held_out_requests), drafter_model.config.num_candidates)
    fit = record(target, drafter_model, fit_requests, args.batch_size, "fit")
    fit.check_enough()  # on every process, before the other half is decoded
    held_out = record(target, drafter_model, held_out_requests, args.batch_size, "held out")
    if state.is_main_process:
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
    with loading("drafter", name):
        model = DSparkModel.from_pretrained(name, dtype="auto").eval()
    if not model.config.enable_confidence_head:
        raise ValueError(f"`--drafter` has to have a confidence head, but {name!r} has none.")
    return model


def read_prompts(args: CalibrateArguments) -> list[Prompt]:
    """Shuffled, since prompts of a kind may take turns and every second one is held out."""
    prompts = load_prompts(args.prompts, limit=args.prompt_limit)
    if len(prompts) < 2:
        raise ValueError("`--prompts` has to hold at least 2 prompts, one to fit and one to measure on, but holds 1.")
    random.Random(args.seed).shuffle(prompts)
    return prompts


def make_requests(
    args: CalibrateArguments, prompts: list[Prompt], target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Request], list[Request]]:
    """Those to fit and those to measure on."""
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


def check_room(args: CalibrateArguments, num_prompts: int, num_candidates: int) -> None:
    """Raises `ValueError` if so many prompts, the smaller half, cannot give enough blocks, even if none is kept."""
    most = num_prompts * max(0, args.max_new_tokens - 1 - num_candidates)  # the last tokens leave no room for a block
    if most < MIN_RECORDS:
        raise ValueError(
            f"`--max_new_tokens` {args.max_new_tokens} and {num_prompts} prompts to measure on give at most {most} "
            f"blocks of {num_candidates} candidates, but {MIN_RECORDS} are needed: give longer texts or more prompts."
        )


def record(
    target: PreTrainedModel, drafter_model: DSparkModel, requests: list[Request], batch_size: int, name: str
) -> ConfidenceRecords:
    """Decodes the requests on all processes and gives each the records of all of them."""
    state = PartialState()
    drafter = DSparkDrafter(drafter_model, keep_confidence=True)
    recorder = ConfidenceRecorder(drafter)
    decoder = Decoder(target, drafter, max_batch_size=batch_size, on_round=recorder)
    with state.split_between_processes(requests) as share:
        progress = tqdm(total=len(share), desc=f"{name}, prompts", disable=not state.is_main_process)
        for progressed in decoder.run(share):
            progress.update(sum(request.finish_reason is not None for request in progressed))
        progress.close()
    return ConfidenceRecords.concatenate(gather_object([recorder.records()] if recorder.parts else []))


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
