"""A tiny Trainer for the tests of evaluation by generation: a model that drops out, a tokenizer, ragged texts."""

from pathlib import Path
from typing import Any

from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from tests.support.models import EOS, PAD, VOCAB_SIZE, character_tokenizer, make_model

LETTERS = "".join(chr(48 + i) for i in range(VOCAB_SIZE))
PROMPTS = ["DEFG", "H", "IJKLMNO", "PQ", "RST", "UVWXYZ", "abcde"]


def text_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, padding on the right."""
    tokenizer = character_tokenizer(LETTERS)
    tokenizer.pad_token, tokenizer.eos_token = LETTERS[PAD], LETTERS[EOS]
    return tokenizer


def dropout_model(seed: int = 0) -> PreTrainedModel:
    return make_model("gpt2", seed, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)


def training_texts(tokenizer: PreTrainedTokenizerFast, count: int = 24) -> list[dict[str, list[int]]]:
    """Texts of different lengths, as a data collator pads them."""
    texts = [LETTERS[4 + i % 20 : 10 + i % 20 + i % 7] for i in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in tokenizer(texts)["input_ids"]]


def make_trainer(
    folder: Path,
    model: PreTrainedModel,
    callbacks: list[TrainerCallback] | None = None,
    trainer_class: type[Trainer] = Trainer,
    **settings: Any,
) -> Trainer:
    """A Trainer of four steps that evaluates after each."""
    tokenizer = text_tokenizer()
    arguments = {
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
    }
    set_seed(1)
    texts = training_texts(tokenizer)
    return trainer_class(
        model=model,
        args=settings.pop("args_class", TrainingArguments)(str(folder), **arguments | settings),
        train_dataset=texts,
        eval_dataset=texts[:4],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=None),
        callbacks=callbacks,
    )


def losses(trainer: Trainer) -> list[float]:
    """The training losses in `log_history`."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
