"""What the fields of a drafter's config.json may hold, so that a broken file is refused by a sentence."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@dataclass(frozen=True)
class Kind:
    """A test of values, and what passes it in words."""

    words: str
    test: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return type(value) is int


INT = Kind("an int", _is_int)
COUNT = Kind("an int of at least 0", lambda value: _is_int(value) and value >= 0)
SIZE = Kind("an int of at least 1", lambda value: _is_int(value) and value >= 1)
EVEN_SIZE = Kind("an even int of at least 2", lambda value: _is_int(value) and value >= 2 and value % 2 == 0)
FLAG = Kind("true or false", lambda value: type(value) is bool)
NUMBER = Kind(
    "a finite number of at least 0", lambda value: type(value) in (int, float) and 0 <= value and math.isfinite(value)
)
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
    **dict.fromkeys(("markov_rank", "num_anchors"), COUNT),
    **dict.fromkeys(("mask_token_id", "draft_vocab_size", "bos_token_id", "pad_token_id"), INT),
    **dict.fromkeys(("sample_from_anchor", "enable_confidence_head", "confidence_head_with_markov"), FLAG),
    **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias", "qk_norm", "value_norm"), FLAG),
    **dict.fromkeys(("attention_k_eq_v", "value_from_key", "sandwich_norms", "bonus_anchor"), FLAG),
    **dict.fromkeys(("rms_norm_eps", "initializer_range", "attention_dropout"), NUMBER),
    **dict.fromkeys(("final_logit_softcapping", "attention_scale"), NUMBER),
    **dict.fromkeys(("target_layer_ids", "aux_hidden_state_layer_ids"), LAYERS),
    **dict.fromkeys(("layer_types", "architectures"), NAMES),
    **dict.fromkeys(("dspark_config", "dflash_config", "text_config", "transformer_layer_config"), MAPPING),
    **dict.fromkeys(("hidden_act", "hidden_activation"), ACTIVATION),
    "eos_token_id": IDS,
}
MAY_BE_NULL = {
    "num_target_layers",
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
            raise ValueError(f"`{name}` has to be {kind.words}, but is {value!r}.")


def check_rope(parameters: Any) -> None:
    """Raises `ValueError` for rotary parameters of an unknown type."""
    if parameters is not None and not ROPE.test(parameters):
        raise ValueError(f"`rope_parameters` have to be {ROPE.words}, but are {parameters!r}.")
