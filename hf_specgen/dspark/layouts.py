"""The layouts in which drafters are published: what their config.json says, in the words of `DSparkConfig`, and back.

Released: DeepSeek's flat file over the target's own configuration. Speculators: vllm-project/speculators. DFlash:
z-lab's, read only. Their tensors have the same names. Knows dictionaries, no models.
"""

from typing import Any

from transformers import CONFIG_MAPPING

from ..arguments import shown
from ..engine.drafter import hidden_state_indices
from .field_kinds import check_fields, check_rope

LAYOUTS = ("released", "dspark", "speculators")
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "initializer_range",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "layer_types",
    "mlp_bias",
)
DRAFTER_FIELDS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "sample_from_anchor",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "draft_vocab_size",
    "num_anchors",
)
ESSENTIAL_FIELDS = ("block_size", "mask_token_id", "target_layer_ids")
FAMILY_FIELDS = (
    "qk_norm",
    "attention_bias",
    "attention_output_bias",
    "attention_scale",
    "value_norm",
    "value_from_key",
    "sandwich_norms",
    "embedding_scale",
    "final_logit_softcapping",
)
GEMMA4_TYPES = ("gemma4_text", "gemma4_unified_text")
FAMILY_TYPES = ("qwen3", "qwen2", "llama", "mistral", *GEMMA4_TYPES)
CHANGES_FORWARD = {"logit_scale": 1.0, "use_swa": False, "causal": False}  # what is known of these is their default
NOT_OF_A_DRAFTER = {  # what would make transformers open other files or run other code
    "quantization_config",
    "transformers_weights",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
}
OTHER_NAMES = {"noise_token_id": "mask_token_id"}  # of DeepSeek-V4's own configuration


def is_drafter(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a DSpark or DFlash drafter, in any layout."""
    if config.get("model_type") == "dspark" or config.get("speculators_model_type") in ("dspark", "dflash"):
        return True
    settings = _flat_settings(config)
    return "speculators_model_type" not in config and all(settings.get(name) is not None for name in ESSENTIAL_FIELDS)


def read_layout(config: dict[str, Any]) -> dict[str, Any]:
    """
    The fields of `DSparkConfig` from a config.json of any layout.

    Raises:
        `ValueError`: if the file is not a drafter's, or of a family that is not known.
    """
    if not config or config.get("model_type") == "dspark":
        check_fields(config, frozenset(config))
        if foreign := NOT_OF_A_DRAFTER & config.keys():
            raise ValueError(f"`{min(foreign)}` is not supported in the config.json of a drafter; take it out.")
        return config
    is_speculators = "speculators_model_type" in config or "transformer_layer_config" in config
    check_fields(config, frozenset(DRAFTER_FIELDS) | {"head_dim", "num_key_value_heads", "aux_hidden_state_layer_ids"})
    settings = _speculators_settings(config) if is_speculators else _flat_settings(config)
    if missing := [name for name in ESSENTIAL_FIELDS if settings.get(name) is None]:
        hint = " (in speculators' files `aux_hidden_state_layer_ids`)" if is_speculators else ""
        raise ValueError(
            f"This config.json (architectures {shown(config.get('architectures'))}) is not that of a DSpark or DFlash "
            f"drafter: it has no {', '.join(f'`{name}`' for name in missing)}{hint}."
        )
    _check_settings(settings)
    fields = {name: settings[name] for name in DRAFTER_FIELDS if settings.get(name) is not None}
    fields |= _family_fields(settings)
    for name in ("dtype", "torch_dtype"):
        if name in config:
            fields["dtype"] = config[name]
    known = {*SHARED_FIELDS, *DRAFTER_FIELDS, "dtype", "torch_dtype", "transformers_version"}
    source = config["transformer_layer_config"] if is_speculators else config
    rest = {name: value for name, value in source.items() if name not in known and not name.startswith("_")}
    if is_speculators:
        rest["speculators_config"] = config.get("speculators_config")
    return {**fields, "model_type": "dspark", "published_config": rest}


def _check_settings(settings: dict[str, Any]) -> None:
    is_derived = settings.get("model_type") != "qwen3"
    check_fields(settings, frozenset(DRAFTER_FIELDS) | ({"head_dim", "num_key_value_heads"} if is_derived else set()))
    rope = settings.get("rope_parameters")
    check_rope(rope.get("full_attention", rope) if isinstance(rope, dict) else rope)
    layer_types, num_layers = settings.get("layer_types"), settings.get("num_hidden_layers")
    if layer_types is not None and num_layers is not None and len(layer_types) != num_layers:
        raise ValueError(
            f"`layer_types` has to name one kind per layer, `num_hidden_layers` {num_layers}, but is "
            f"{shown(layer_types)}."
        )
    for name, default in CHANGES_FORWARD.items():
        if settings.get(name) not in (None, default):
            raise ValueError(f"Drafters with `{name}` {shown(settings[name])} are not supported.")
    if settings.get("model_type") == "mistral" and settings.get("sliding_window") is not None:
        raise ValueError(f"Drafters with a `sliding_window` ({shown(settings['sliding_window'])}) are not supported.")


def _flat_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Top-level keys, over which nested ones and then `dspark_`-prefixed ones win."""
    settings = {**config, **(config.get("text_config") or {})}
    for nested in ("dflash_config", "dspark_config"):
        settings |= config.get(nested) or {}
    for source in (config, config.get("text_config") or {}):
        settings |= {n.removeprefix("dspark_"): v for n, v in source.items() if n.startswith("dspark_")}
    settings.pop("config", None)
    for other, name in OTHER_NAMES.items():
        if other in settings:
            settings[name] = settings[other]
    if "bonus_anchor" in settings:  # vLLM's older name: a bonus anchor predicts nothing
        settings.setdefault("sample_from_anchor", not settings["bonus_anchor"])
    architecture = (config.get("architectures") or [""])[0]
    # z-lab's slot 0 predicts nothing; DeepSeek's DFlash files bear the architecture of DSpark, and their layout.
    if architecture == "DFlashDraftModel" or ("dflash_config" in config and "DSpark" not in architecture):
        settings.setdefault("sample_from_anchor", False)
    return settings


def _speculators_settings(config: dict[str, Any]) -> dict[str, Any]:
    """speculators counts hidden states instead of layers: 0 is the embedding output."""
    if not isinstance(config.get("transformer_layer_config"), dict):
        raise ValueError("`transformer_layer_config` has to be an object in a file of speculators, but is not there.")
    is_dspark = config.get("speculators_model_type", "dspark") == "dspark"
    settings = {
        "sample_from_anchor": is_dspark,
        "markov_rank": 256 if is_dspark else 0,
        **config["transformer_layer_config"],
        **{name: config[name] for name in DRAFTER_FIELDS if config.get(name) is not None},
    }
    if config.get("aux_hidden_state_layer_ids") is not None:
        settings["target_layer_ids"] = [index - 1 for index in config["aux_hidden_state_layer_ids"]]
    return settings


def _family_fields(settings: dict[str, Any]) -> dict[str, Any]:
    model_type = settings.get("model_type")
    if model_type not in FAMILY_TYPES:
        known = ", ".join(FAMILY_TYPES)
        raise ValueError(f"`model_type` is {shown(model_type)}, whose layers are not known; known are {known}.")
    if model_type in GEMMA4_TYPES:
        return _gemma4_fields(settings)
    # The file may hold only what differs from the family's defaults.
    try:
        family = CONFIG_MAPPING[model_type](**settings)
    except Exception as error:  # transformers has several of its own
        raise ValueError(
            f"The layers that this config.json describes cannot be made: {' '.join(str(error).split())}."
        ) from error
    full = family.to_dict()
    fields = {name: full[name] for name in SHARED_FIELDS if name in full}
    has_bias = model_type == "qwen2" or bool(full.get("attention_bias"))
    fields["head_dim"] = full.get("head_dim") or full["hidden_size"] // full["num_attention_heads"]
    fields["qk_norm"] = model_type == "qwen3"
    fields["attention_bias"] = has_bias
    fields["attention_output_bias"] = has_bias and model_type != "qwen2"
    fields["layer_types"] = full.get("layer_types")
    return fields


def _gemma4_fields(settings: dict[str, Any]) -> dict[str, Any]:
    """A Gemma4 drafter has the target's global layers only."""
    if missing := [name for name in ("hidden_size", "num_key_value_heads") if name not in settings]:
        raise ValueError(f"A Gemma4 drafter's config.json has to hold `{missing[0]}`, but does not.")
    for name in ("enable_moe_block", "hidden_size_per_layer_input"):
        if settings.get(name):
            raise ValueError(f"Gemma4 drafters with `{name}` ({shown(settings[name])}) are not supported.")
    fields = {name: settings[name] for name in SHARED_FIELDS if name in settings}
    overrides = [*(settings.get("per_layer_config") or {}).values(), {}][0]
    is_key_value = bool(settings.get("attention_k_eq_v"))
    head_dim = settings.get("global_head_dim") or overrides.get("head_dim") or settings.get("head_dim")
    if head_dim is None:
        raise ValueError("A Gemma4 drafter's config.json has to hold `global_head_dim` or `head_dim`, but does not.")
    num_heads = settings.get("num_global_key_value_heads") or overrides.get("num_key_value_heads")
    rope = settings.get("rope_parameters") or {}
    return fields | {
        "head_dim": head_dim,
        "num_key_value_heads": num_heads if is_key_value and num_heads else settings["num_key_value_heads"],
        "hidden_act": settings.get("hidden_activation", "gelu_pytorch_tanh"),
        "rope_parameters": rope.get("full_attention", rope),
        "qk_norm": True,
        "attention_bias": bool(settings.get("attention_bias")),
        "attention_output_bias": bool(settings.get("attention_bias")),
        "attention_scale": 1.0,
        "value_norm": True,
        "value_from_key": is_key_value,
        "sandwich_norms": True,
        "embedding_scale": settings["hidden_size"] ** 0.5,
        "final_logit_softcapping": settings.get("final_logit_softcapping"),
    }


def write_layout(fields: dict[str, Any], layout: str) -> dict[str, Any]:
    """
    The contents of config.json from the fields of `DSparkConfig`; the opposite of `read_layout`.

    Raises:
        `ValueError`: if the layout cannot express the drafter.
    """
    if layout == "dspark":
        return fields
    family = _family(fields)
    shared = {name: fields[name] for name in SHARED_FIELDS if name in fields}
    if family != "llama":
        del shared["mlp_bias"]
    published = dict(fields.get("published_config") or {})
    speculators_config = published.pop("speculators_config", None)
    layers = {**published, **shared, "model_type": family, "attention_bias": fields["attention_bias"]}
    layers["tie_word_embeddings"] = False
    if family == "gemma4_text":
        layers |= _gemma4_layers(fields, published)
    if layout == "speculators":
        return _write_speculators(fields, layers, speculators_config)
    drafter = {name: fields[name] for name in DRAFTER_FIELDS}
    # Keys at their defaults are left out, as DeepSeek's own files do.
    for name, default in (("sample_from_anchor", True), ("draft_vocab_size", None), ("num_target_layers", None)):
        if drafter[name] == default:
            del drafter[name]
    if not drafter["markov_rank"]:
        del drafter["markov_head_type"]
    if not drafter["enable_confidence_head"]:
        del drafter["confidence_head_with_markov"]
    prefix = {"gemma4_text": "Gemma4"}.get(family, family.capitalize())
    stamp = {name: fields[name] for name in ("dtype", "transformers_version") if fields.get(name)}
    for nested in ("dflash_config", "dspark_config", "text_config", "auto_map", "per_layer_config"):
        layers.pop(nested, None)
    layers = {name: value for name, value in layers.items() if not name.startswith("dspark_")}
    return {**layers, **drafter, **stamp, "architectures": [f"{prefix}DSparkModel"]}


def _family(fields: dict[str, Any]) -> str:
    """The model type whose layers these are."""
    families: dict[str, dict[str, Any]] = {
        "gemma4_text": {"sandwich_norms": True, "value_norm": True, "qk_norm": True, "attention_scale": 1.0},
        "qwen3": {"qk_norm": True, "attention_output_bias": fields["attention_bias"], "mlp_bias": False},
        "qwen2": {"qk_norm": False, "attention_bias": True, "attention_output_bias": False, "mlp_bias": False},
        "llama": {"qk_norm": False, "attention_output_bias": fields["attention_bias"]},
    }
    plain: dict[str, Any] = {
        "attention_scale": None,
        "value_norm": False,
        "value_from_key": False,
        "sandwich_norms": False,
    }
    plain |= {"embedding_scale": 1.0, "final_logit_softcapping": None}
    for family, expected in families.items():
        if family != "gemma4_text":
            expected = plain | expected
        if all(fields[name] == value for name, value in expected.items()):
            return family
    settings = {name: fields[name] for name in FAMILY_FIELDS}
    raise ValueError(
        f"No published layout knows layers like these, {settings}; save the drafter with `layout='dspark'`."
    )


def _gemma4_layers(fields: dict[str, Any], published: dict[str, Any]) -> dict[str, Any]:
    """The keys of Gemma4's text configuration that bear other names or hold more than the drafter's own."""
    rope = {
        "full_attention": fields["rope_parameters"],
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    return {
        "head_dim": published.get("head_dim", fields["head_dim"]),
        "global_head_dim": fields["head_dim"],
        "num_global_key_value_heads": fields["num_key_value_heads"],
        "attention_k_eq_v": fields["value_from_key"],
        "hidden_activation": fields["hidden_act"],
        "rope_parameters": rope,
        "final_logit_softcapping": fields["final_logit_softcapping"],
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    }


def _write_speculators(
    fields: dict[str, Any], layers: dict[str, Any], speculators_config: dict[str, Any] | None
) -> dict[str, Any]:
    num_candidates = fields["block_size"] if fields["sample_from_anchor"] else fields["block_size"] - 1
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_candidates,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    others = ("target_layer_ids", "num_target_layers", "draft_vocab_size", "num_anchors")
    names = [name for name in DRAFTER_FIELDS if name not in others]
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": layers,
        "draft_vocab_size": fields["draft_vocab_size"] or fields["vocab_size"],
        "aux_hidden_state_layer_ids": hidden_state_indices(fields["target_layer_ids"]),
        "tie_word_embeddings": False,
        "dtype": fields.get("dtype"),
        "speculators_config": speculators_config
        or {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        **{name: fields[name] for name in names},
    }
