"""What plain `generate` is told so that it does what `SamplingParams` say."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from transformers import GenerationConfig, LogitsProcessorList

from hf_specgen import SamplingParams


def generation_config(
    params: SamplingParams, eos_token_ids: Collection[int], pad_token_id: int | None = None
) -> GenerationConfig:
    """All that a config can say. Stop strings need `tokenizer=`, and stay in the ids."""
    warpers: dict[str, Any] = {}
    if not params.is_greedy:
        names = ("temperature", "top_k", "top_p", "min_p")
        warpers = {name: getattr(params, name) for name in names}
    return GenerationConfig(
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.min_new_tokens,
        do_sample=not params.is_greedy,
        repetition_penalty=params.repetition_penalty if params.penalty_scope in (None, "all") else 1.0,
        num_return_sequences=params.n,
        stop_strings=list(params.stop) or None,
        eos_token_id=sorted(params.stop_ids(eos_token_ids)) or -1,
        pad_token_id=pad_token_id,
        **warpers,
    )


def extra_processors(params: SamplingParams, prompt_length: int) -> LogitsProcessorList:
    """What a config cannot say."""
    rest = replace(params, repetition_penalty=1.0) if params.penalty_scope in (None, "all") else params
    return LogitsProcessorList([*rest._penalties(prompt_length), *rest._bias()])
