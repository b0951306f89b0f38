"""What a drafter takes from its target, whether they fit, and the settings of a new drafter for a target.

Knows transformers models; of the drafter only its configuration and whether tables are absent.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..engine.model_facts import check_vocab_sizes, num_input_ids
from ..engine.support import is_sharded
from .configuration import DSparkConfig, check_tapped_layers
from .layouts import FAMILY_TYPES, read_layout

NEW_DRAFTER = {
    "num_hidden_layers": 5,
    "block_size": 7,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
NUM_TAPPED_LAYERS = 5
LAYER_SIZES = (
    "vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def borrowed(target: PreTrainedModel | None, getter: str) -> Any:
    """The target's embeddings or head, for a drafter without its own."""
    if target is None:
        raise ValueError(
            "This drafter has no token embeddings or head of its own: pass the `target` that it drafts for, or call "
            "`share_weights(target)` once."
        )
    return head_of(target) if getter == "get_output_embeddings" else target.get_input_embeddings()


def head_of(target: PreTrainedModel) -> nn.Linear:
    """The target's output head."""
    head = target.get_output_embeddings()
    if head is None:
        raise ValueError(f"`{type(target).__name__}` has no output head to draft with.")
    return head


def check_target(config: DSparkConfig, target: PreTrainedModel, takes_tables: bool) -> None:
    """
    Raises `ValueError` if a drafter cannot be for this target: another width, depth or vocabulary, layers that
    cannot be tapped, or tables to be taken (`takes_tables`) from a target whose parameters are spread over ranks.
    """
    target_config = target.config.get_text_config(decoder=True)
    for what, own, other in (
        ("hidden size", config.hidden_size, target_config.hidden_size),
        ("number of target layers", config.num_target_layers, target_config.num_hidden_layers),
    ):
        if own is not None and own != other:
            raise ValueError(
                f"The drafter was made for a {what} of {own}, but `{type(target).__name__}` has {other}: it belongs "
                "to another target."
            )
    check_tapped_layers(config.target_layer_ids, target_config.num_hidden_layers)
    check_vocab_sizes(target_config.vocab_size, config.vocab_size)
    if not takes_tables:
        return
    rows = num_input_ids(target)
    if rows != config.vocab_size:
        raise ValueError(
            f"The drafter takes its embeddings or head from the target, which has {rows} rows, but it was made for a "
            f"vocabulary of {config.vocab_size}."
        )
    if is_sharded(target):
        raise ValueError(
            "The drafter takes its embeddings or head from the target, whose parameters are spread over ranks. Save "
            "it once with `share_weights(target)` and `save_pretrained`, so that it has its own."
        )


def settings_for_target(target: PreTrainedModel, mask_token_id: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The fields of [`DSparkConfig`] for a new drafter of the target's family."""
    config = target.config.get_text_config(decoder=True)
    depth = config.num_hidden_layers
    drafter = {
        **NEW_DRAFTER,
        "mask_token_id": mask_token_id,
        "target_layer_ids": default_target_layer_ids(depth),
        "num_target_layers": depth,
    }
    if settings.get("markov_rank") == 0:
        drafter["confidence_head_with_markov"] = False
    if unknown := set(settings) - set(DSparkConfig.__dataclass_fields__):
        raise ValueError(f"`{min(unknown)}` is not a field of `DSparkConfig`.")
    for name in ("vocab_size", "hidden_size", "num_target_layers"):
        own = depth if name == "num_target_layers" else getattr(config, name)
        if settings.get(name, own) not in (own, None):
            raise ValueError(f"`{name}` has to be the target's, {own}, but is {settings[name]!r}.")
    width = target.get_input_embeddings().weight.shape[1]
    if width != config.hidden_size:
        raise ValueError(
            f"The target's embeddings are {width} wide and its states {config.hidden_size}; not supported."
        )
    num_layers = settings.get("num_hidden_layers", drafter["num_hidden_layers"])
    layers = config.to_dict() if config.model_type in FAMILY_TYPES else _plain_layers(config)
    layers |= {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers, "sliding_window": None}
    fields = read_layout({**layers, **drafter, "num_hidden_layers": num_layers})
    scale = getattr(target.get_input_embeddings(), "scalar_embed_scale", None)
    if scale is not None:
        fields["embedding_scale"] = float(scale)
    fields["published_config"] = None
    del fields["model_type"]
    return fields | settings


def _plain_layers(config: Any) -> dict[str, Any]:
    """Qwen3 layers of the target's width, for families without drafter layers of their own."""
    known = {name: getattr(config, name) for name in LAYER_SIZES if hasattr(config, name)}
    known = {name: value for name, value in known.items() if value is not None}
    if "num_attention_heads" not in known:
        raise ValueError(f"The target's configuration ({config.model_type}) names no attention heads.")
    num_heads = known["num_attention_heads"]
    derived = {
        "intermediate_size": 4 * config.hidden_size,
        "num_key_value_heads": num_heads,
        "head_dim": config.hidden_size // num_heads,
    }
    return {"model_type": "qwen3", "hidden_size": config.hidden_size} | derived | known


def default_target_layer_ids(num_target_layers: int) -> list[int]:
    """Five layers spread evenly from the second to the last but two; of shallow ones the last that can be tapped."""
    last = num_target_layers - 3
    if last < NUM_TAPPED_LAYERS:
        return list(range(num_target_layers - 1))[-NUM_TAPPED_LAYERS:] or [-1]
    steps = NUM_TAPPED_LAYERS - 1
    return [round(1 + index * (last - 1) / steps) for index in range(NUM_TAPPED_LAYERS)]
