"""What the fields of a drafter's config.json may hold, so that a broken file is refused by a sentence."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..arguments import FP32_MAX, shown
from ..engine.limits import CANDIDATE_COLUMNS


@dataclass(frozen=True)
class Kind:
    """A test of values, and what passes it in words."""

    words: str
    test: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= FP32_MAX  # False for NaN


def _is_dtype(value: Any) -> bool:
    dtype = torch.__dict__.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


INT = Kind("an int", _is_int)
COUNT = Kind("an int of at least 0", lambda value: _is_int(value) and value >= 0)
SIZE = Kind("an int of at least 1", lambda value: _is_int(value) and value >= 1)
EVEN_SIZE = Kind("an even int of at least 2", lambda value: _is_int(value) and value >= 2 and value % 2 == 0)
FLAG = Kind("true or false", lambda value: type(value) is bool)
NUMBER = Kind("a finite number of at least 0", lambda value: _is_number(value) and value >= 0)
SIGNED = Kind("a finite number", lambda value: _is_number(value))
POSITIVE = Kind("a finite number above 0", lambda value: _is_number(value) and value > 0)
SHARE = Kind("a number in [0, 1]", lambda value: _is_number(value) and 0 <= value <= 1)
DTYPE = Kind("the name of a floating-point type of torch", lambda value: _is_dtype(value))
LAYERS = Kind("a list of ints", lambda value: isinstance(value, list) and all(map(_is_int, value)))
IDS = Kind("an int or a list of ints", lambda value: _is_int(value) or LAYERS.test(value))
NAMES = Kind("a list of names", lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value))
MAPPING = Kind("an object", lambda value: isinstance(value, Mapping))
ROPE = Kind(
    f"an object whose `rope_type` is 'default' or one of {sorted(ROPE_INIT_FUNCTIONS)}",
    lambda value: MAPPING.test(value) and value.get("rope_type", "default") in ("default", *ROPE_INIT_FUNCTIONS),
)
ACTIVATION = Kind("the name of an activation", lambda value: isinstance(value, str) and value in ACT2FN)

KINDS = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "block_size"), SIZE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads"), SIZE),
    **dict.fromkeys(("max_position_embeddings", "num_target_layers"), SIZE),
    **dict.fromkeys(("head_dim", "global_head_dim"), EVEN_SIZE),
    **dict.fromkeys(("markov_rank", "num_anchors", "num_labels"), COUNT),
    **dict.fromkeys(("mask_token_id", "draft_vocab_size", "bos_token_id", "pad_token_id"), INT),
    **dict.fromkeys(("sample_from_anchor", "enable_confidence_head", "confidence_head_with_markov"), FLAG),
    **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias", "qk_norm", "value_norm"), FLAG),
    **dict.fromkeys(
        ("attention_k_eq_v", "value_from_key", "sandwich_norms", "bonus_anchor", "tie_word_embeddings"), FLAG
    ),
    **dict.fromkeys(("rms_norm_eps", "initializer_range", "attention_scale"), NUMBER),
    "final_logit_softcapping": POSITIVE,
    "attention_dropout": SHARE,
    **dict.fromkeys(("target_layer_ids", "aux_hidden_state_layer_ids"), LAYERS),
    **dict.fromkeys(("layer_types", "architectures"), NAMES),
    **dict.fromkeys(("dspark_config", "dflash_config", "text_config", "transformer_layer_config"), MAPPING),
    **dict.fromkeys(("id2label", "label2id", "rope_parameters", "rope_scaling", "published_config"), MAPPING),
    **dict.fromkeys(("hidden_act", "hidden_activation"), ACTIVATION),
    **dict.fromkeys(("dtype", "torch_dtype"), DTYPE),
    "embedding_scale": SIGNED,
    "rope_theta": POSITIVE,
    "eos_token_id": IDS,
}
# Beyond these no drafter lies, and a broken file would cost memory or time before its tensors are looked at.
MOST = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "num_anchors", "markov_rank"), 2**31 - 1),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads"), 2**16),
    **dict.fromkeys(("head_dim", "global_head_dim"), 2**16),
    **dict.fromkeys(("num_hidden_layers", "num_target_layers", "num_labels"), 2**10),
    "max_position_embeddings": 2**53,
    "block_size": CANDIDATE_COLUMNS,  # what a round verifies at most, with the anchor
}
MAY_BE_NULL = {
    "num_target_layers",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "id2label",
    "label2id",
    "published_config",
    "dtype",
    "torch_dtype",
    "sample_from_anchor",
    "num_global_key_value_heads",
    "global_head_dim",
    "draft_vocab_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "final_logit_softcapping",
    "attention_scale",
    "layer_types",
    "architectures",
    "dspark_config",
    "dflash_config",
    "text_config",
}


def check_fields(fields: Mapping[str, Any], nullable: frozenset[str] = frozenset()) -> None:
    """
    Raises `ValueError` for the first field that holds what it may not.

    Args:
        fields (`Mapping[str, Any]`): any fields; those without a known kind pass.
        nullable (`frozenset[str]`, *optional*): fields that may be null beside those that always may.
    """
    for name, value in fields.items():
        kind = KINDS.get(name)
        if kind is None or (value is None and (name in MAY_BE_NULL or name in nullable)):
            continue
        if not kind.test(value):
            raise ValueError(f"`{name}` has to be {kind.words}, but is {shown(value)}.")
        if name in MOST and value is not None and value > MOST[name]:
            raise ValueError(f"`{name}` has to be at most {MOST[name]}, but is {shown(value)}.")


def check_rope(parameters: Any) -> None:
    """Raises `ValueError` for rotary parameters of an unknown type, or with numbers that cannot be."""
    if parameters is None:
        return
    if not ROPE.test(parameters):
        raise ValueError(f"`rope_parameters` have to be {ROPE.words}, but are {shown(parameters)}.")
    for name, value in parameters.items():
        kind = POSITIVE if name == "rope_theta" else SIGNED
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (is_number or kind is POSITIVE) and not kind.test(value):
            raise ValueError(f"`{name}` of `rope_parameters` has to be {kind.words}, but is {shown(value)}.")
