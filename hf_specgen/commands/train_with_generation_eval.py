"""Trains a tiny model to write dates with transformers' Trainer, which evaluates it by what it writes."""

import calendar
import json
import random
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import (
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_specgen import SamplingParams

from .models import byte_tokenizer
from .options.train_with_generation_eval import NUM_TEXTS, TrainArguments
from .processes import start_processes

METRIC = "exact_match"
YEARS = range(1900, 2100)


def main(args: TrainArguments) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    state = start_processes()
    set_seed(args.seed)
    trainer = make_trainer(args)
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    history = list(trainer.state.log_history)
    loaded = trainer.evaluate(metric_key_prefix="best")  # the best model, which has been loaded
    if state.is_main_process:
        evaluations = evaluations_of(history)
        print_evaluations(evaluations, args.completions)
        report = {
            "num_processes": state.num_processes,
            "device": str(trainer.model.device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "seed": args.seed,
            "train_seconds": round(seconds, 1),
            "best_step": trainer.state.best_global_step,
            f"best_{METRIC}": trainer.state.best_metric,
            "loaded": {name: loaded[f"best_{name}"] for name in ("loss", METRIC, "eos_rate", "tokens_per_second")},
        }
        if args.plot:
            draw_curves(history, evaluations, trainer.state.best_global_step, args.folder / args.plot)
            report["plot"] = str(args.folder / args.plot)
        print(json.dumps(report))
    state.destroy_process_group()


def make_texts(seed: int) -> list[dict[str, str]]:
    """Dates in words and figures, each once, in a random order."""
    generator = random.Random(seed)
    dates = [(year, month, day) for year in YEARS for month in range(1, 13) for day in range(1, 29)]
    texts = []
    for year, month, day in generator.sample(dates, NUM_TEXTS):
        name = calendar.month_name[month]
        suffix = {1: "st", 2: "nd", 3: "rd"}.get(day % 10 if day not in (11, 12, 13) else 0, "th")
        wordings = (f"{day} {name} {year}", f"{name} {day}, {year}", f"{day}{suffix} of {name} {year}")
        texts.append({"prompt": f"{generator.choice(wordings)} is", "completion": f" {year}-{month:02}-{day:02}"})
    return texts


def encode(text: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """For the Trainer: only the completion and its end are learned."""
    prompt, completion = tokenizer(text["prompt"])["input_ids"], tokenizer(text["completion"])["input_ids"]
    completion = [*completion, tokenizer.eos_token_id]
    return {"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion}


def make_trainer(args: TrainArguments) -> Trainer:
    """A Trainer that evaluates by generating."""
    from trainers import GenerationEvalCallback

    tokenizer = byte_tokenizer(is_padding_first=False)
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    texts = make_texts(args.seed)
    held_out = texts[: args.num_prompts]
    trainer = Trainer(
        model=make_model(tokenizer),
        args=training_arguments(args),
        train_dataset=[encode(text, tokenizer) for text in texts[args.num_prompts :]],
        eval_dataset=[encode(text, tokenizer) for text in held_out],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    trainer.remove_callback(PrinterCallback)
    GenerationEvalCallback(
        Dataset.from_list(held_out),
        SamplingParams(max_new_tokens=16, temperature=0.0),
        metrics=[METRIC, *(["chrf"] if find_spec("sacrebleu") else [])],
        backend=args.backend,
        output_dir=str(args.completions),
        log_completions=args.num_shown,
    ).attach(trainer)
    return trainer


def training_arguments(args: TrainArguments) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(args.folder),
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=50,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=args.eval_steps,
        eval_on_start=True,
        save_strategy="steps",
        save_steps=args.eval_steps,
        save_total_limit=1,
        metric_for_best_model=METRIC,
        greater_is_better=True,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=args.seed,
    )


def make_model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def evaluations_of(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was logged at the step of each evaluation."""
    steps: dict[int, dict[str, Any]] = {}
    for entry in log_history:
        steps.setdefault(entry["step"], {}).update(entry)
    return [entry for entry in steps.values() if f"eval_{METRIC}" in entry]


def print_evaluations(evaluations: list[dict[str, Any]], folder: Path) -> None:
    """What a person reads: loss, metrics, and the text that was wrong for longest."""
    texts = [read_texts(folder / f"eval_step_{entry['step']:08d}.jsonl") for entry in evaluations]
    chosen = max(
        range(len(texts[0])), key=lambda i: sum(each[i]["completion"] != each[i]["reference"] for each in texts)
    )
    names = ["eval_loss", f"eval_{METRIC}", "eval_chrf", "eval_eos_rate", "eval_tokens_per_second"]
    names = [name for name in names if name in evaluations[0]]
    table = Table(title="Held-out prompts")
    for name in ("step", *names):
        table.add_column(name.removeprefix("eval_").replace("_", " "), justify="right")
    table.add_column(texts[0][chosen]["prompt"])
    for entry, each in zip(evaluations, texts):
        figures = [f"{entry[name]:.0f}" if entry[name] > 100 else f"{entry[name]:.3f}" for name in names]
        table.add_row(str(entry["step"]), *figures, each[chosen]["completion"].strip())
    Console(width=110).print(table)


def read_texts(file: Path) -> list[dict[str, Any]]:
    """What the callback kept of an evaluation."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def draw_curves(
    log_history: list[dict[str, Any]], evaluations: list[dict[str, Any]], best_step: int | None, file: Path
) -> None:
    """The losses above, the metrics of generated text below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    losses, metrics = figure.subplots(2, 1, sharex=True)
    training = [entry for entry in log_history if "loss" in entry]
    steps = [entry["step"] for entry in evaluations]
    losses.plot([entry["step"] for entry in training], [entry["loss"] for entry in training], label="training")
    losses.plot(steps, [entry["eval_loss"] for entry in evaluations], marker="o", label="held out")
    losses.set(yscale="log", ylabel="loss per token", title="What the loss shows")
    for name, scale in {"eos_rate": 1, "chrf": 100, METRIC: 1}.items():
        if f"eval_{name}" in evaluations[0]:
            values = [entry[f"eval_{name}"] / scale for entry in evaluations]
            metrics.plot(steps, values, marker="o", label=name.replace("_", " ") + (" / 100" if scale > 1 else ""))
    metrics.set(xlabel="step", ylabel="share", ylim=(-0.03, 1.03), title="What the generated texts show")
    for axes in (losses, metrics):
        if best_step is not None:
            axes.axvline(best_step, color="gray", linestyle=":", label="best model")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=150)
