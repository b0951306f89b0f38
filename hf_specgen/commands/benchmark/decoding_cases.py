"""What `benchmark` measures of decoding: plain, stock and ours over the same prompts, in turn."""

import copy
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specgen import Decoder, DecodingStats, DSparkModel, Request, enable_speculation
from hf_specgen.engine import eos_ids

from ..models import left_padded
from .measuring import Measurement, Outputs, Runner, Setting, measure
from .reference_dspark import reference_generate


def on_device(batch: dict[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.to(model.device) for name, tensor in batch.items()}


def generate_in_batches(model: PreTrainedModel, setting: Setting, batch_size: int, **kwargs: Any) -> tuple:
    """`generate` over padded batches in the order of the prompts; padding and what follows eos is dropped."""
    outputs: Outputs = []
    stats: DecodingStats | None = None
    ends = eos_ids(model.generation_config.eos_token_id)
    for start in range(0, len(setting.prompts), batch_size):
        batch = left_padded(setting.prompts[start : start + batch_size], setting.pad_token_id)
        batch = on_device(batch, model)
        ids = model.generate(**batch, **(setting.generate_kwargs | kwargs))
        for row in ids[:, batch["input_ids"].shape[1] :].tolist():
            end = next((i + 1 for i, token_id in enumerate(row) if token_id in ends), len(row))
            outputs.append(row[:end])
        if kwargs.keys() & {"assistant_model", "prompt_lookup_num_tokens"}:
            own = getattr(model, "speculation_stats", None)
            stats = own if stats is None or own is None else stats + own
    return outputs, stats


def speculation_case(setting: Setting, batch_size: int, draft_kwargs: dict, is_tuned: bool) -> list[Measurement]:
    """Plain and stock assisted `generate` against ours with the same drafter."""
    plain = copy.copy(setting.model)  # shares the weights, keeps its class
    ours = enable_speculation(copy.copy(setting.model))

    def runner(name: str, model: PreTrainedModel, tuned: bool = False, **kwargs: Any) -> Runner:
        run = partial(generate_in_batches, model, setting, batch_size, **kwargs)
        return Runner(name, run, tuned, partial(run, max_new_tokens=1))

    runners = [runner("plain generate", plain)]
    draft = draft_kwargs.get("assistant_model")
    if batch_size == 1:
        if isinstance(draft, DSparkModel) and not setting.generate_kwargs["do_sample"]:
            run = partial(reference_case, draft, setting)
            runners.append(Runner("straightforward DSpark loop", run, prefill=partial(run, max_new_tokens=1)))
        runners.append(runner("stock assisted generate", plain, **draft_kwargs))
    runners.append(runner("speculative", ours, **draft_kwargs))
    if is_tuned:
        runners.append(runner("plain generate, tuned linears", plain, tuned=True))
        runners.append(runner("speculative, tuned linears", ours, tuned=True, **draft_kwargs))
    return measure(runners, setting, batch_size, setting.generate_kwargs["do_sample"])


def reference_case(draft: DSparkModel, setting: Setting, max_new_tokens: int | None = None) -> tuple[Outputs, None]:
    """The loop of reference_dspark.py over the prompts, one by one."""
    count = setting.generate_kwargs["max_new_tokens"] if max_new_tokens is None else max_new_tokens
    ends = eos_ids(setting.model.generation_config.eos_token_id)
    return [reference_generate(setting.model, draft, prompt, count, ends) for prompt in setting.prompts], None


def ragged_budgets(setting: Setting) -> list[int]:
    """Budgets from 8 to 128 tokens, one per prompt."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(8, 129, (len(setting.prompts),), generator=generator).tolist()


def ragged_padded(setting: Setting, budgets: list[int], order: list[int], slots: int) -> tuple[Outputs, None]:
    """Padded `generate` over batches in this order, each as long as its largest budget."""
    outputs: dict[int, list[int]] = {}
    for start in range(0, len(order), slots):
        chosen = order[start : start + slots]
        batch = left_padded([setting.prompts[index] for index in chosen], setting.pad_token_id)
        batch = on_device(batch, setting.model)
        longest = max(budgets[index] for index in chosen)
        ids = setting.model.generate(**batch, max_new_tokens=longest, do_sample=False, eos_token_id=None)
        for index, row in zip(chosen, ids[:, batch["input_ids"].shape[1] :].tolist()):
            outputs[index] = row[: budgets[index]]
    return [outputs[index] for index in range(len(order))], None


def ragged_case(setting: Setting, slots: int) -> list[Measurement]:
    """Ragged budgets, greedy, without eos: padded `generate` in batches against the decoder with as many slots."""
    budgets = ragged_budgets(setting)
    by_budget = sorted(range(len(budgets)), key=lambda index: -budgets[index])

    def through_decoder() -> tuple[Outputs, DecodingStats]:
        requests = [Request(prompt, budget) for prompt, budget in zip(setting.prompts, budgets)]
        decoder = Decoder(setting.model, max_batch_size=slots)
        for _ in decoder.run(requests):
            pass
        return [request.token_ids for request in requests], decoder.stats

    runners = [
        Runner(
            f"padded generate in batches of {slots}",
            lambda: ragged_padded(setting, budgets, list(range(len(budgets))), slots),
        ),
        Runner("the same, batches sorted by budget", lambda: ragged_padded(setting, budgets, by_budget, slots)),
        Runner(f"Decoder with {slots} slots", through_decoder),
    ]
    return measure(runners, setting, slots)


def batching_case(setting: Setting, batch_size: int, draft_kwargs: dict) -> list[Measurement]:
    """Speculation one prompt at a time against speculation in a batch."""
    model = enable_speculation(copy.copy(setting.model))
    runners = [
        Runner("speculative, one by one", lambda: generate_in_batches(model, setting, 1, **draft_kwargs)),
        Runner(
            f"speculative, batches of {batch_size}",
            lambda: generate_in_batches(model, setting, batch_size, **draft_kwargs),
        ),
    ]
    return measure(runners, setting, batch_size, setting.generate_kwargs["do_sample"])
