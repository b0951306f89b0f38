"""
What each rank of `trainers/test_distributed.py` does; torchrun starts this file:

    python -m torch.distributed.run --nproc-per-node 3 tests/support/eval_ranks.py OUTPUT_FOLDER CASE [CASE ...]
"""

import copy
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import distributed
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback
from transformers.distributed import DistributedConfig

from hf_specgen import PromptLookupDrafter, SamplingParams
from tests.support.models import EOS, PAD, cycle_model, make_model, noisy_copy
from tests.support.training import LETTERS, PROMPTS, dropout_model, losses, make_trainer, text_tokenizer
from trainers import EvalGeneration, GenerationEvalCallback
from trainers.sharding import generating_model

GREEDY = SamplingParams(max_new_tokens=8, temperature=0)
LONG = SamplingParams(max_new_tokens=32, temperature=0)
SAMPLED = SamplingParams(max_new_tokens=8, seed=5, n=2)
ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}
RING = 40
RING_EOS = RING - 1
UNEQUAL = [LETTERS[RING_EOS - 28], LETTERS[RING_EOS - 8]]  # texts of 28 and 8 tokens, and nothing for a third rank


def ring_model():
    """Every letter is followed by the next one, up to the end of text."""
    model = cycle_model([(letter + 1) % RING for letter in range(RING)])
    model.generation_config.eos_token_id = RING_EOS
    return model


def texts_of(model, prompts=PROMPTS, params=GREEDY, backend="batched", **settings) -> list[dict[str, Any]]:
    generated = EvalGeneration(prompts, params, backend, settings).generate(model, text_tokenizer())
    return [
        {
            "index": text.index,
            "sample": text.sample,
            "text": text.text,
            "length": len(text.token_ids),
            "error": None if text.error is None else str(text.error),
        }
        for text in generated.completions
    ]


def splitting(folder: Path) -> dict:
    """Seven prompts, one prompt, and samples, over however many ranks there are."""
    model = make_model().eval()
    return {
        "seven": texts_of(model),
        "one": texts_of(model, PROMPTS[:1]),
        "samples": texts_of(model, params=SAMPLED),
        "one prompt's samples": texts_of(model, PROMPTS[:1], SAMPLED),
    }


class PassCount:
    def __init__(self, model):
        self.count = 0
        model.register_forward_pre_hook(self.add)

    def add(self, *args):
        self.count += 1


class Training:
    """A model in training with SGD, on the same text on every rank. Subclasses know another way of sharding it."""

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self) -> torch.Tensor:
        ids = torch.arange(3, 15)[None]
        return self.model(input_ids=ids, labels=ids).loss

    def step(self) -> float:
        self.model.train()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters, whole."""
        values = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in self.model.named_parameters()}
        return {name: value.detach().clone() for name, value in values.items()}

    def held(self) -> list[tuple]:
        """What this rank holds of each parameter."""
        values = [v.to_local() if isinstance(v, DTensor) else v for v in self.model.parameters()]
        kinds = [type(v).__name__ for v in self.model.parameters()]
        return [(kind, tuple(value.shape), value.tolist()) for kind, value in zip(kinds, values)]


class FullyShardedTraining(Training):
    """FSDP2."""

    def __init__(self, model):
        for layer in model.model.layers:
            fully_shard(layer)
        super().__init__(fully_shard(model))


class WrappedTraining(Training):
    """FSDP1."""

    def __init__(self, model, use_orig_params: bool):
        policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
        settings = {"auto_wrap_policy": policy, "device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
        super().__init__(FullyShardedDataParallel(model, **settings))

    def weights(self) -> dict[str, torch.Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in self.model.named_parameters()]
            return {n: value.detach().clone() for n, value in zip(names, self.model.parameters())}


class PartitionedTraining(Training):
    """ZeRO-3."""

    def __init__(self, model):
        import deepspeed

        self.gathering = deepspeed.zero.GatheredParameters
        config = {"train_micro_batch_size_per_gpu": 1, **ZERO3}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.model = self.engine.module

    def step(self) -> float:
        self.engine.train()
        loss = self.loss()
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def weights(self) -> dict[str, torch.Tensor]:
        with self.gathering(list(self.model.parameters())):
            return super().weights()

    def held(self) -> list[tuple]:
        return [(tuple(value.shape), value.ds_tensor.tolist()) for value in self.model.parameters()]


def sharded(make_training: Callable[[PreTrainedModel], Training], folder: Path) -> dict:
    """Texts between two steps of training, unequal texts, and an error on one rank."""
    results: dict[str, Any] = {}
    for name in ("without", "with"):
        training = make_training(make_model(gain=4.0))
        history = [training.step()]
        if name == "with":
            results |= between_steps(training)
        results[f"losses {name}"] = [*history, training.step(), training.step()]
    ring = make_training(ring_model()).model.eval()
    with generating_model(ring) as (target, rounds):
        passes = PassCount(target)
        results["is synchronised"] = rounds is not None
    results["unequal"] = texts_of(ring, UNEQUAL, LONG)
    results["num_passes"] = passes.count
    results["error"] = error_of(ring, FailingDrafter(2))
    results["after the error"] = texts_of(ring, UNEQUAL, LONG)
    return results


def between_steps(training: Training) -> dict:
    training.model.eval()
    held, weights = training.held(), training.weights()
    plain = make_model()
    missing, unexpected = plain.load_state_dict(weights, strict=False)
    assert not unexpected and not missing, "the names are those of the whole model"
    results: dict[str, Any] = {"texts": texts_of(training.model)}
    speculative = EvalGeneration(PROMPTS, GREEDY, "speculative", {"draft_model": noisy_copy(plain)}).generate(
        training.model, text_tokenizer()
    )
    results["speculative"] = [text.text for text in speculative.completions]
    results["acceptance_rate"] = speculative.stats.acceptance_rate
    results["expected"] = [plain_text(plain, prompt) for prompt in PROMPTS]
    results["weights are equal"] = all(torch.equal(weights[name], v) for name, v in training.weights().items())
    results["shards are equal"] = training.held() == held
    return results


def plain_text(model, prompt: str) -> str:
    """What the model's own `generate` makes of a prompt that stands alone, without the id that ends it."""
    tokenizer = text_tokenizer()
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    mask = torch.ones_like(ids)
    settings = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": [PAD], "synced_gpus": False}
    output = model.generate(input_ids=ids, attention_mask=mask, **settings)
    generated = output[0, ids.shape[1] :].tolist()
    return tokenizer.decode([token_id for token_id in generated if token_id != EOS])


class UnboundDrafter(PromptLookupDrafter):
    """Fails on the second rank, before its texts."""

    def bind(self, target):
        if PartialState().process_index == 1:
            raise LookupError("the draft is gone")


class FailingDrafter(PromptLookupDrafter):
    """Fails on the second rank, in the midst of its text."""

    num_calls = 0

    def draft(self, rows, max_tokens):
        self.num_calls += 1
        if PartialState().process_index == 1 and self.num_calls == 3:
            raise LookupError("the draft is gone")
        return super().draft(rows, max_tokens)


def error_of(model, drafter: PromptLookupDrafter) -> str:
    """What is raised on this rank."""
    try:
        texts_of(model, UNEQUAL, LONG, "speculative", draft_model=drafter)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def whole(folder: Path) -> dict:
    """The errors of one rank where every rank goes at its own pace."""
    model = ring_model()
    return {
        "error": error_of(model, UnboundDrafter(2)),
        "with a failed text": texts_of(model, UNEQUAL, LONG, "speculative", draft_model=FailingDrafter(2)),
        "after the errors": texts_of(model, UNEQUAL, LONG),
    }


def broken_pass(folder: Path) -> dict:
    """An error inside a pass of a sharded model, on one rank; the others wait in that pass."""
    model = FullyShardedTraining(ring_model()).model.eval()
    texts_of(model, UNEQUAL, LONG)

    def fail(*args):
        raise MemoryError("no room on this rank")

    if PartialState().process_index == 1:
        model.model.layers[-1].register_forward_pre_hook(fail)
    return {"texts": texts_of(model, UNEQUAL, LONG)}


def fsdp2_lora(folder: Path) -> dict:
    """A `PeftModel` around the model: the parameters of no layer are gathered by the outer module only."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    whole = get_peft_model(make_model(), adapter).eval()
    expected = texts_of(copy.deepcopy(whole))
    model = copy.deepcopy(whole)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    texts = texts_of(model)
    assert "forward" not in vars(model.get_base_model())
    return {"texts": texts, "expected": expected, "base": texts_of(make_model())}


class Collector(TrainerCallback):
    def __init__(self):
        self.metrics, self.kinds = [], set()

    def on_evaluate(self, args, state, control, metrics=None, model=None, **kwargs):
        own = {name: value for name, value in metrics.items() if name not in ("eval_loss",) and "_per_" not in name}
        self.metrics.append({name: value for name, value in own.items() if not name.endswith("runtime")})
        is_zero3 = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
        self.kinds.add("zero3" if is_zero3 else "fsdp2" if isinstance(model, FSDPModule) else "whole")


def rank_number(completions, references) -> dict[str, float]:
    """A metric that differs from rank to rank unless one of them speaks for all."""
    return {"rank": float(PartialState().process_index + 1)}


def train(folder: Path, name: str, make: Callable[[], PreTrainedModel], params=GREEDY, **settings: Any) -> dict:
    """Two trainings, with the callback and without."""
    results = {}
    models = {"without": make(), "with": make()}  # before DeepSpeed changes how models are made
    for which, model in models.items():
        collector = Collector()
        trainer = make_trainer(folder / name / which, model, [collector], **settings)
        if which == "with":
            callback = GenerationEvalCallback(
                PROMPTS, params, references=PROMPTS, metrics=["exact_match", rank_number]
            )
            callback.attach(trainer)
        trainer.train()
        results[f"losses {which}"] = losses(trainer)
    results["metrics"] = collector.metrics
    results["kinds"] = sorted(collector.kinds)
    results["num_logged"] = sum("eval_rank" in entry for entry in trainer.state.log_history)
    lines = (folder / name / "with" / "completions" / "eval_step_00000004.jsonl").read_text().splitlines()
    results["lines"] = [(line["index"], line["sample"]) for line in map(json.loads, lines)]
    return results


def train_ddp(folder: Path) -> dict:
    return train(folder, "ddp", dropout_model, SAMPLED)


def train_fsdp2(folder: Path) -> dict:
    """A model that transformers itself shards when it loads it."""
    if PartialState().is_main_process:
        make_model().save_pretrained(folder / "model")
    distributed.barrier()
    config = DistributedConfig(fsdp_size=distributed.get_world_size())
    return train(
        folder, "fsdp2", lambda: AutoModelForCausalLM.from_pretrained(folder / "model", distributed_config=config)
    )


def train_zero3(folder: Path) -> dict:
    settings = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", **ZERO3}
    return train(folder, "zero3", make_model, deepspeed=settings)


CASES = {
    "splitting": splitting,
    "whole": whole,
    "fsdp1": partial(sharded, partial(WrappedTraining, use_orig_params=True)),
    "fsdp1_flat": partial(sharded, partial(WrappedTraining, use_orig_params=False)),
    "fsdp2": partial(sharded, FullyShardedTraining),
    "fsdp2_lora": fsdp2_lora,
    "broken_pass": broken_pass,
    "zero3": partial(sharded, PartitionedTraining),
    "train_ddp": train_ddp,
    "train_fsdp2": train_fsdp2,
    "train_zero3": train_zero3,
}


def main() -> None:
    folder, *cases = sys.argv[1:]
    state = PartialState(cpu=True)
    results = {}
    for case in cases:
        results[case] = CASES[case](Path(folder))
        (Path(folder) / f"rank_{state.process_index}.json").write_text(json.dumps(results))
    if state.num_processes > 1:
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
