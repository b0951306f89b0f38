"""Which models the loop can serve, as their classes and configurations tell: layer kinds, attention, sharding."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_managed_module

from ..layers.attention import GROUPED_ATTENTION
from ..layers.slot_cache import unserved_layers

OWN_WINDOW_TYPES = {"gpt_neo", "moshi", "imagegpt", "bark"}


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why the loop cannot decode with this model, None if its configuration has nothing against it."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"`{name}` is an encoder-decoder model"
    if model._is_stateful:
        return f"`{name}` has recurrent or linear-attention layers, whose state cannot be rolled back"
    text_config = model.config.get_text_config(decoder=True)
    if layers := unserved_layers(text_config):
        return f"`{name}` has {layers}"
    if model.config.model_type in OWN_WINDOW_TYPES:
        return f"`{name}` cuts its attention windows by the length of the longest row"
    config = model.config.to_dict()
    if config["model_type"] in ("bloom", "mpt") or config.get("alibi"):
        return f"`{name}` builds alibi position biases from a 2-D attention mask"
    if text_config._attn_implementation not in ("eager", "sdpa", GROUPED_ATTENTION):
        return (
            f"`{name}` runs on {text_config._attn_implementation!r} attention, which takes no 4-D mask; call "
            "`model.set_attn_implementation('sdpa')`"
        )
    return None


def is_sharded(model: Any) -> bool:
    """Whether the model's parameters are spread over ranks by FSDP or ZeRO-3."""
    if not isinstance(model, nn.Module):
        return False
    return is_fsdp_managed_module(model) or any(hasattr(parameter, "ds_id") for parameter in model.parameters())
