"""Runs the cases one after the other. What a case found is printed and written at once, so that nothing is lost when a
later one fails or somebody stops the run."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase, set_seed

from hf_specgen import DSparkModel, tune_linears
from hf_specgen.dspark import check_drafter
from hf_specgen.prompts import encode_prompt, load_prompts

from ..models import load_draft_model, load_model, noisy_draft
from ..options.benchmark import DEFAULT_NUM_ASSISTANT_TOKENS, SHARED_CASES, BenchmarkArguments
from ..processes import environment, start_processes
from ..report_file import ReportFile
from ..runner import in_one_line
from .decoding_cases import batching_case, ragged_case, speculation_case
from .evaluation_cases import evaluation_case
from .measuring import Interrupted, Measurement, Setting, total_of
from .serving_cases import serving_case, streaming_case
from .step_cases import attention_case, overhead_case, processors_case
from .tables import print_environment, print_result

Result = list[dict[str, Any]] | dict[str, Any]
Case = Callable[[], Any]  # a `Result`, or the `Measurement`s of this process


@dataclass
class Report:
    """What is measured so far, kept in a file too. Only the main process has one that prints."""

    file: ReportFile
    content: dict[str, Any]
    is_main: bool
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, result: Result) -> None:
        """Prints a result, behind what the same case found before, and writes the file."""
        if not self.is_main:
            return
        if isinstance(result, list):
            self.content.setdefault(name, []).extend(result)
        else:
            self.content[name] = result
        print_result(name, result)
        self.file.write(self.content)

    def fail(self, name: str, error: Exception) -> None:
        """Keeps why a case has no result."""
        self.failed[name] = f"{type(error).__name__}: {in_one_line(error)}"
        self.content["failed"] = self.failed
        self.file.write(self.content)
        print(f"error: the case {name!r} failed: {self.failed[name]}", file=sys.stderr, flush=True)


def main(args: BenchmarkArguments) -> None:
    transformers.logging.set_verbosity_error()
    texts = load_prompts(args.prompts, args.categories, args.prompt_limit)
    state = start_processes()
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    set_seed(args.seed)
    model, tokenizer = load_model(args.model, args.tokenizer)
    model.to(state.device)
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
    content = {"settings": asdict(args), "environment": environment(state)}
    report = Report(ReportFile(args.output if state.is_main_process else None), content, state.is_main_process)
    if state.is_main_process:
        print_environment(args.model, content["environment"])
        draft = draft_kwargs.get("assistant_model")
        if isinstance(draft, DSparkModel):
            report.add("drafter_check", asdict(check_drafter(draft, model, tokenizer)))
    try:
        run_cases(cases(args, setting, tokenizer, draft_kwargs), report, state)
    finally:
        if state.is_main_process:
            print(json.dumps(report.content), flush=True)
    state.destroy_process_group()
    if report.failed:
        raise SystemExit(1)


def cases(
    args: BenchmarkArguments, setting: Setting, tokenizer: PreTrainedTokenizerBase, draft_kwargs: dict[str, Any]
) -> Iterator[tuple[str, Case]]:
    """The cases asked for; one that is measured for several batch sizes is there for each."""
    largest = max(args.batch_sizes)
    for size in args.batch_sizes:
        yield "speculation", partial(speculation_case, setting, size, draft_kwargs, args.tune_linears)
    yield "ragged", partial(ragged_case, setting, largest)
    yield "batching", partial(batching_case, setting, largest, draft_kwargs)
    yield "serving", partial(serving_case, setting, tokenizer, largest, serving_drafter(args, draft_kwargs))
    yield "evaluation", partial(evaluation_case, setting, tokenizer)
    yield "streaming", partial(streaming_case, setting, tokenizer)
    yield "attention", partial(attention_lines, setting, "stock")
    if args.tune_linears:
        yield "attention", partial(attention_lines, setting, "tuned")
    yield "overhead", partial(overhead_case, setting, draft_kwargs)
    yield "processors", partial(processors_case, args.repeats)


def run_cases(all_cases: Iterator[tuple[str, Case]], report: Report, state: PartialState) -> None:
    """
    Runs those asked for. In one process a case that fails does not keep the others from running; several processes
    end together, since one that failed would leave the others waiting.
    """
    for name, case in all_cases:
        is_shared = name in SHARED_CASES
        if name not in report.content["settings"]["cases"] or not (is_shared or state.is_main_process):
            continue
        try:
            result = case()
            report.add(name, merged(result) if is_measured(result) else result)
        except Interrupted as interruption:
            if state.num_processes == 1:
                report.add(name, merged(interruption.lines))
            raise
        except Exception as error:
            if state.num_processes > 1:
                raise
            report.fail(name, error)
    state.wait_for_everyone()


def is_measured(result: Any) -> bool:
    return isinstance(result, list) and all(isinstance(line, Measurement) for line in result)


def merged(lines: list[Measurement]) -> list[dict[str, Any]]:
    """The lines of all processes added up, with the speed-up over the first line."""
    results = [total_of(parts).to_dict() for parts in zip(*gather_object([lines]))]
    for entry in results:
        entry["speedup"] = entry["tokens_per_second"] / results[0]["tokens_per_second"]
    return results


def attention_lines(setting: Setting, linears: str) -> list[dict[str, Any]]:
    if linears == "stock":
        return [{"linears": linears, **entry} for entry in attention_case(setting)]
    with tune_linears(setting.model):
        return [{"linears": linears, **entry} for entry in attention_case(setting)]


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
        draft.confidence_threshold = args.confidence_threshold or 0.0
    elif args.confidence_threshold is not None:
        raise ValueError(f"`--confidence_threshold` is for DSpark drafters, which {args.draft_model!r} is not.")
    if args.num_assistant_tokens is not None or not isinstance(draft, DSparkModel):
        own.num_assistant_tokens = args.num_assistant_tokens or DEFAULT_NUM_ASSISTANT_TOKENS
    return {"assistant_model": draft}


def serving_drafter(args: BenchmarkArguments, draft_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The settings of a backend that drafts as `draft_kwargs` makes `generate` do."""
    draft = draft_kwargs.get("assistant_model")
    count = args.num_lookup_tokens if draft is None else args.num_assistant_tokens
    settings = {"draft_model": draft, "num_assistant_tokens": count}
    return {name: value for name, value in settings.items() if value is not None}
