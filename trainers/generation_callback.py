"""GenerationEvalCallback: metrics of generated text while a Trainer trains, on one process or many."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import (
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import logging

from hf_specgen import SamplingParams
from hf_specgen.arguments import check_count

from .completion_log import CompletionLog
from .distribution import on_main_rank
from .eval_generation import EvalGeneration, GeneratedTexts
from .eval_prompts import EvalPrompts
from .metrics import builtin_metrics, resolve_metrics
from .preservation import preserved
from .prompt_columns import check_known

logger = logging.get_logger(__name__)
DEFAULT_PREFIX = "eval"


@dataclass(frozen=True)
class Measured:
    """The metrics of one evaluation without their prefix, and whether one of those asked for is missing."""

    step: int
    values: dict[str, float]
    is_incomplete: bool


class GenerationEvalCallback(TrainerCallback):
    """
    Generates from prompts while a model is trained, and measures the texts.

    The metrics get the prefix of the evaluation (`eval_exact_match`) and go to the dictionary that `evaluate` returns,
    where `metric_for_best_model` and `EarlyStoppingCallback` look, and once to `trainer.log`, that is to `log_history`
    and every tracker; the same values on all ranks. The texts are saved as JSONL, a file for each evaluation.

    Training goes on as if nothing had been generated: modes, configurations and random numbers are as before. Texts
    that cannot be saved, on a disk that is full for example, are named in the log once and do not end it.

    ```python
    callback = GenerationEvalCallback(dataset, SamplingParams(max_new_tokens=64, temperature=0), metrics=["rouge_l"])
    callback.attach(trainer)
    trainer.train()
    ```

    Args:
        prompts (`Sequence` or [`~datasets.Dataset`]):
            Texts, chat messages or ids, or a data set of them; see [`EvalPrompts.of`].
        params ([`SamplingParams`], *optional*):
            How to decode, with `n` samples for each prompt. Without a `seed`, 0 is taken: each prompt and sample has
            random numbers of its own, the same in every evaluation.
        references (`Sequence`, *optional*), max_prompts (`int`, *optional*), columns (`str`, *optional*):
            As in [`EvalPrompts.of`].
        metrics (*optional*):
            Besides those that need nothing else, see [`resolve_metrics`] and [`builtin_metrics`].
        backend (`str`, *optional*, defaults to `"batched"`), backend_settings (`Mapping[str, Any]`, *optional*):
            As in [`get_generation_backend`], for example `"speculative"` and `{"draft_model": draft}`.
        name (`str`, *optional*):
            Tells the callbacks of one Trainer apart: a part of the metrics' prefix (`eval_gsm8k_exact_match`) and of
            the files' names.
        output_dir (`str`, *optional*):
            Where the texts go; by default to `completions` in the Trainer's output directory.
        every (`str` or `int`, *optional*, defaults to `"evaluate"`):
            When: with each evaluation of the Trainer, after so many steps, or after each `"epoch"`. What is measured
            at other times than an evaluation is logged with the prefix `eval`, but cannot choose the best model. A
            warning says so when training begins if that never happens, as with `eval_strategy="no"`.
        log_completions (`int`, *optional*, defaults to 0):
            So many of the first texts are printed and given to TensorBoard, W&B and Trackio as a table.
        strict (`bool`, *optional*, defaults to `False`):
            Whether a metric that raises, or a prompt that fails, ends the training. Otherwise the evaluation goes on
            without the metric, with an empty text for the prompt, and says so in the log once.

    Raises:
        `ValueError` or `TypeError`: for arguments that are unknown or do not fit together; at the beginning of the
            training for what does not fit the model, and an `output_dir` that cannot be written to.
    """

    def __init__(
        self,
        prompts: Any,
        params: SamplingParams | None = None,
        *,
        references: Sequence[Any] | None = None,
        metrics: Any = (),
        backend: str = "batched",
        backend_settings: Mapping[str, Any] | None = None,
        max_prompts: int | None = None,
        name: str | None = None,
        output_dir: str | None = None,
        every: str | int = "evaluate",
        log_completions: int = 0,
        strict: bool = False,
        **columns: str | None,
    ):
        check_known(columns, type(self))
        is_count = isinstance(every, int) and not isinstance(every, bool) and every > 0
        if every not in ("evaluate", "epoch") and not is_count:
            raise ValueError(f'`every` has to be "evaluate", "epoch" or a number of steps, but is {every!r}.')
        if name is not None and not (isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)):
            raise ValueError(f"`name` has to be a text of letters, digits, `_`, `.` and `-`, but is {name!r}.")
        chosen = EvalPrompts.of(prompts, references, max_prompts, **columns)
        self.references = chosen.references
        params = SamplingParams() if params is None else params
        self.generation = EvalGeneration(
            chosen.prompts, params, backend, backend_settings or {}, chosen.template_settings
        )
        self.metrics = resolve_metrics(metrics)
        for metric in self.metrics:
            metric.check_references(self.references)
        self.name = name
        self.output_dir = output_dir
        self.every = every
        self.log_completions = check_count("log_completions", log_completions, minimum=0)
        self.strict = strict
        self._trainer: Trainer | None = None
        self._reported: set[str] = set()
        self._last: Measured | None = None

    def attach(self, trainer: Trainer) -> "GenerationEvalCallback":
        """
        Puts this callback in front of the Trainer's others, so that all of them see its metrics, and returns it.

        Raises:
            `ValueError`: if the Trainer has another one with the same `name`, or also without one.
        """
        callbacks = trainer.callback_handler.callbacks
        for other in callbacks:
            if isinstance(other, GenerationEvalCallback) and other is not self and other.name == self.name:
                raise ValueError(
                    f"The Trainer has a `GenerationEvalCallback` with the `name` {self.name!r} already: one would "
                    "overwrite the other's metrics and files. Give each a `name` of its own."
                )
        callbacks[:] = [self, *(callback for callback in callbacks if callback is not self)]
        self._trainer = trainer
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._attached_trainer()
        self._last = None
        if state.is_world_process_zero and (reason := self._why_never(args, state)):
            logger.warning(f"`GenerationEvalCallback` generates nothing in this training: {reason}")
        on_main_rank(lambda: self._log().check(self.references))
        model, tokenizer = kwargs["model"], _tokenizer_of(kwargs["processing_class"])
        with preserved([model, *self.generation.draft_models], tokenizer):
            self.generation.check(model, tokenizer)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer = self._attached_trainer()
        if self.every != "evaluate":
            return
        metrics = kwargs["metrics"]
        prefix = self._named(_prefix_of(metrics))
        # In training, another evaluation set at the same step means the same weights, and so the same texts.
        if not (trainer.is_in_train and self._last is not None and self._last.step == state.global_step):
            self._last = self._evaluate(prefix, **kwargs)
        metrics.update(_prefixed(self._last.values, prefix))
        wanted = f"eval_{(args.metric_for_best_model or '').removeprefix('eval_')}"
        if self._last.is_incomplete and wanted.startswith(prefix) and wanted not in metrics:
            metrics[wanted] = math.nan  # never the best, but not missing, which would end the training

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if isinstance(self.every, int) and state.global_step % self.every == 0:
            self._evaluate(self._named(DEFAULT_PREFIX), **kwargs)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.every == "epoch":
            self._evaluate(self._named(DEFAULT_PREFIX), **kwargs)

    def _attached_trainer(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError(
                "`GenerationEvalCallback` needs the Trainer to log with, and a place in front of the callbacks that "
                "read metrics. Call `callback.attach(trainer)` instead of adding it to `callbacks`."
            )
        return self._trainer

    def _named(self, prefix: str) -> str:
        return prefix if self.name is None else f"{prefix}_{self.name}"

    def _log(self) -> CompletionLog:
        default = Path(self._attached_trainer().args.output_dir) / "completions"
        directory = default if self.output_dir is None else Path(self.output_dir)
        return CompletionLog(directory, self.log_completions, self._say_once)

    def _why_never(self, args: TrainingArguments, state: TrainerState) -> str | None:
        """Why the moment to generate does not come in this training, None if it comes."""
        if isinstance(self.every, int):
            if state.max_steps // self.every == state.global_step // self.every:
                return f"`every` is {self.every}, but it ends after {state.max_steps} steps."
        elif self.every == "evaluate" and not args.eval_on_start:
            if args.eval_strategy == IntervalStrategy.NO:
                return (
                    '`every="evaluate"` waits for evaluations, but `eval_strategy` is "no". Set `eval_strategy`, or '
                    'give `every` a number of steps or "epoch".'
                )
            end = state.max_steps if args.eval_strategy == IntervalStrategy.STEPS else state.num_train_epochs
            if args.eval_delay > end:
                return f"`eval_delay` is {args.eval_delay}, but it ends at {end}."
        return None

    def _evaluate(self, prefix: str, *, model: nn.Module, processing_class: Any, **kwargs: Any) -> Measured:
        """Generates and measures on all ranks, and logs."""
        trainer, tokenizer = self._attached_trainer(), _tokenizer_of(processing_class)
        with preserved([model, *self.generation.draft_models], tokenizer):
            generated = self.generation.generate(model, tokenizer)
            measured = on_main_rank(lambda: self._report(prefix, generated))
            # In `eval` mode, or trainers that keep metrics of their own take these for some of the training.
            trainer.log(_prefixed(measured.values, prefix))
        return measured

    def _report(self, prefix: str, generated: GeneratedTexts) -> Measured:
        trainer, texts = self._attached_trainer(), generated.completions
        self._note_failures(generated)
        log, step = self._log(), trainer.state.global_step
        log.save(prefix, step, texts, self.references)
        log.show(prefix, step, texts, self.references, trainer.callback_handler.callbacks)
        values, is_incomplete = builtin_metrics(texts, generated.seconds, generated.stats), False
        for metric in self.metrics:
            try:
                computed = metric.compute(texts, self.references)
                if taken := sorted(values.keys() & computed.keys()):
                    raise ValueError(f"`{taken[0]}` is measured already; give it another name.")
                values |= computed
            except Exception as error:
                if self.strict:
                    raise
                is_incomplete = True
                self._say_once(metric.name, f"The metric {metric.name!r} is left out: {type(error).__name__}: {error}")
        return Measured(step, values, is_incomplete)

    def _note_failures(self, generated: GeneratedTexts) -> None:
        failed = [text for text in generated.completions if text.error is not None]
        if not failed:
            return
        message = f"{len(failed)} of {len(generated.completions)} texts failed, first prompt {failed[0].index}: "
        message += str(failed[0].error)
        if self.strict or len(failed) == len(generated.completions):
            raise RuntimeError(message) from failed[0].error
        self._say_once("failed texts", message)

    def _say_once(self, subject: str, message: str) -> None:
        if subject not in self._reported:
            self._reported.add(subject)
            logger.error(message)


def _tokenizer_of(processing_class: Any) -> PreTrainedTokenizerBase:
    tokenizer = processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            "`GenerationEvalCallback` needs the model's tokenizer: give the Trainer `processing_class=tokenizer`. "
            f"It has {processing_class!r}."
        )
    return tokenizer


def _prefixed(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {f"{prefix}_{name}": value for name, value in values.items()}


def _prefix_of(metrics: Mapping[str, Any]) -> str:
    """The prefix of an evaluation, which the Trainer puts before its run time."""
    return next((name.removesuffix("_runtime") for name in metrics if name.endswith("_runtime")), DEFAULT_PREFIX)
