"""What the loop cannot serve, found out before the first token: layer kinds, attention backends, position encodings.

`self_check` compares a ragged pass over two rows with plain passes, once per model.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.distributed.fsdp import is_fsdp_managed_module

from ..layers.attention import GROUPED_ATTENTION
from ..layers.slot_cache import SlotCache, SlotLayer
from .batch import forward, padded
from .request import Request

SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "dummy"}
MAX_PADDING = 1024  # ids by which vocabularies of one tokenizer may differ, unless the tokenizer is there to tell
CHECKED_TOKENS = 24  # longer than the windows of tiny models
OWN_WINDOW_TYPES = {"gpt_neo", "moshi", "imagegpt", "bark"}
ROW_BY_ROW_TYPES = {"chunked_attention"}  # attention over all past tokens, which transformers' own loop serves


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why the loop cannot decode with this model, None if it can."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"`{name}` is an encoder-decoder model"
    if model._is_stateful:
        return f"`{name}` has recurrent or linear-attention layers, whose state cannot be rolled back"
    text_config = model.config.get_text_config(decoder=True)
    unknown = set(get_layer_types_and_kwargs(text_config)[0]) - SERVED_LAYER_TYPES
    if unknown:
        return f"`{name}` has layers of kind {sorted(unknown)}"
    if model.config.model_type in OWN_WINDOW_TYPES:
        return f"`{name}` cuts its attention windows by the length of the longest row"
    if _has_alibi(model):
        return f"`{name}` builds alibi position biases from a 2-D attention mask"
    if text_config._attn_implementation not in ("eager", "sdpa", GROUPED_ATTENTION):
        return (
            f"`{name}` runs on {text_config._attn_implementation!r} attention, which takes no 4-D mask; call "
            "`model.set_attn_implementation('sdpa')`"
        )
    return None


def is_served_by_transformers(model: PreTrainedModel) -> bool:
    """Whether transformers' own assisted decoding is right for a model that `unsupported_reason` names."""
    if model.config.is_encoder_decoder or _has_alibi(model) or model.config.model_type in OWN_WINDOW_TYPES:
        return True
    if model._is_stateful:
        return False
    kinds = set(get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))[0])
    return kinds <= SERVED_LAYER_TYPES | ROW_BY_ROW_TYPES


def _has_alibi(model: PreTrainedModel) -> bool:
    config = model.config.to_dict()
    return config["model_type"] in ("bloom", "mpt") or bool(config.get("alibi"))


def is_sharded(model: Any) -> bool:
    """Whether the model's parameters are spread over ranks by FSDP or ZeRO-3."""
    if not isinstance(model, nn.Module):
        return False
    return is_fsdp_managed_module(model) or any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def check_vocab_sizes(target_size: int, draft_size: int, num_tokens: int | None = None) -> None:
    """
    Lets pass vocabularies of one tokenizer that are padded to different sizes.

    Args:
        target_size, draft_size (`int`): the vocabularies.
        num_tokens (`int`, *optional*): how many tokens their tokenizer has, if that is known.

    Raises:
        `ValueError`: naming the sizes.
    """
    if num_tokens is not None:
        is_one_tokenizer = target_size == draft_size or num_tokens <= min(target_size, draft_size)
    else:
        largest = max(target_size, draft_size)
        is_one_tokenizer = abs(target_size - draft_size) <= min(MAX_PADDING, largest // 5)
    if not is_one_tokenizer:
        raise ValueError(
            f"The target has a vocabulary of {target_size} ids and the draft one of {draft_size}: these are no "
            "paddings of one tokenizer. For a draft with another tokenizer pass `tokenizer=` and "
            "`assistant_tokenizer=`."
        )


def num_input_ids(model: PreTrainedModel) -> int:
    """How many ids the model's input embeddings know."""
    return model.get_input_embeddings().num_embeddings


def check_ids(model: PreTrainedModel, request: Request) -> None:
    """Raises `ValueError` if a request names ids outside the model's vocabulary."""
    vocab_size = num_input_ids(model)
    if (largest := max(request.prompt_ids)) >= vocab_size:
        raise ValueError(f"`prompt_ids` holds {largest}, but the model's vocabulary has {vocab_size} ids.")
    if outside := [i for i in request.rules.eos_token_ids if not 0 <= i < vocab_size]:
        raise ValueError(f"`eos_token_ids` holds {outside}, but the model's vocabulary has {vocab_size} ids.")


def eos_ids(eos_token_id: int | list[int] | None) -> frozenset[int]:
    """The ids that a generation config's `eos_token_id` names."""
    return frozenset(
        () if eos_token_id is None else (eos_token_id,) if isinstance(eos_token_id, int) else eos_token_id
    )


def learned_positions(model: PreTrainedModel) -> int | None:
    """How many positions a model with a table of position embeddings knows, None for other encodings."""
    text_config = model.config.get_text_config(decoder=True)
    limit = text_config.to_dict().get("max_position_embeddings") or text_config.to_dict().get("n_positions")
    for name, module in model.named_modules():
        is_learned = isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in ("wpe", "embed_positions")
        has_table = "embed_positions" in dict(module.named_buffers(recurse=False))  # sinusoids up to the same limit
        if limit is not None and (is_learned or has_table):
            return limit
    return None


def check_positions(model: PreTrainedModel, requests: Iterable[Request], role: str = "target") -> None:
    """
    Refuses requests whose prompt and budget leave the range in which the model's position encoding is exact.

    Raises:
        `ValueError`: naming the numbers.
    """
    ranges = [(len(request.prompt_ids), len(request.prompt_ids) + request.max_new_tokens) for request in requests]
    longest = max((end for _, end in ranges), default=0)
    limit = learned_positions(model)
    if limit is not None and longest > limit:
        raise ValueError(
            f"Prompt and budget come to {longest} tokens, but the {role} has learned positions for {limit}. "
            "Lower `max_new_tokens` or shorten the prompt."
        )
    switch = _rope_switch(model)
    if switch is None or longest <= switch:
        return
    kinds = _rope_types(model)
    if "dynamic" in kinds or any(start <= switch for start, _ in ranges):
        raise ValueError(
            f"The {role}'s {'/'.join(sorted(kinds))} position encoding changes for all tokens when a row passes "
            f"{switch} tokens, and prompt and budget come to {longest}. Keep every row on one side of it."
        )


def _rope_types(model: PreTrainedModel) -> set[str]:
    parameters = model.config.get_text_config(decoder=True).to_dict().get("rope_parameters") or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return {entry.get("rope_type", "default") for entry in nested} & {"longrope", "dynamic"}


def _rope_switch(model: PreTrainedModel) -> int | None:
    """The sequence length at which the rotary frequencies change."""
    if not _rope_types(model):
        return None
    config = model.config.get_text_config(decoder=True).to_dict()
    parameters = config["rope_parameters"]
    return (
        parameters.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or config["max_position_embeddings"]
    )


_checked: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()
_check_lock = threading.Lock()


@torch.no_grad()
def self_check(model: PreTrainedModel) -> None:
    """
    Compares two ragged rows on a [`SlotCache`] with a plain pass over each, at the first use of a model.

    Raises:
        `ValueError`: if the logits differ, with the difference found.
    """
    with _check_lock:
        if model in _checked:
            return
    flags = {module: module.training for module in model.modules() if module.training}
    try:
        for module in flags:
            module.training = False
        cache = SlotCache(model.config, num_rows=2)
        difference = _ragged_difference(model, cache)
    except (RuntimeError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise ValueError(
            f"`{type(model).__name__}` cannot run on ragged rows ({error}). Use it without `enable_speculation`."
        ) from error
    finally:
        for module, training in flags.items():
            module.training = training
    # What is cached tells the precision of the computation, which autocast lowers below that of the weights.
    buffers = [(layer.keys, layer.values) for layer in cache.layers if isinstance(layer, SlotLayer)]
    cached = {buffer.dtype for pair in buffers for buffer in pair}
    tolerance = 1e-3 if cached <= {torch.float32, torch.float64} else 0.1
    if not difference <= tolerance:
        raise ValueError(
            f"`{type(model).__name__}` does not decode ragged rows as it decodes single ones: the logits differ by "
            f"{difference:.2g} of their largest value. Use it without `enable_speculation`."
        )
    with _check_lock:
        _checked.add(model)


def _ragged_difference(model: PreTrainedModel, cache: SlotCache) -> float:
    """The largest difference of logits over their largest value; fills the two rows of an empty cache."""
    vocab_size = num_input_ids(model)
    limits = [n for n in (learned_positions(model), _rope_switch(model)) if n is not None]
    longest = min([CHECKED_TOKENS, *limits])
    texts = [[(7 * i + 3) % vocab_size for i in range(n)] for n in (longest, max(3, longest // 2))]
    expected = [
        model(input_ids=torch.tensor([text], device=model.device), use_cache=False).logits[0, -1].float()
        for text in texts
    ]
    rows = slice(0, 2)
    heads, head_lengths = padded([text[:-2] for text in texts], model.device)
    forward(model, cache, rows, heads, head_lengths)
    tails, tail_lengths = padded([text[-2:] for text in texts], model.device)
    actual = forward(model, cache, rows, tails, tail_lengths).logits[:, -1].float()
    difference = max(float((a - e).abs().max()) for a, e in zip(actual, expected))
    largest = max(float(e.abs().max()) for e in expected)
    return difference / largest if largest > 0 else difference
