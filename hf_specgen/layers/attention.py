"""Attention for masked blocks of a few positions, without a copy of the shared keys and values.

transformers' sdpa function repeats every key and value once per query head of its group as soon as there is a mask
and more than one position. Verification is exactly that case. The function here turns the query heads that share a
key/value head into query rows instead; every other call goes to transformers' own function.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_ATTENTION = "hf_specgen_grouped"
MAX_POSITIONS = 16  # beyond, the copy no longer matters and the mask would grow with the number of groups


def grouped_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """
    Scaled dot product attention in the form of transformers' `AttentionInterface`, with grouped heads kept grouped.

    Args:
        query (`torch.Tensor` of shape `(rows, heads, new, head_dim)`), key and value
            (`(rows, kv_heads, columns, head_dim)`): the states.
        attention_mask (`torch.Tensor` of shape `(rows, 1, new, columns)`, *optional*):
            True where attention is allowed, or what is added to the scores. On CPU an additive mask is the faster one,
            since sdpa turns booleans into it in every layer.

    Returns:
        The output of shape `(rows, new, heads, head_dim)`, and None for the weights.
    """
    rows, heads, new, _ = query.shape
    kv_heads = key.shape[1]
    if attention_mask is None or not _is_groupable(query, key, attention_mask, kwargs):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    groups = heads // kv_heads
    columns = attention_mask.shape[-1]
    grouped_mask = attention_mask.expand(rows, groups, new, columns).reshape(rows, 1, groups * new, columns)
    output = nn.functional.scaled_dot_product_attention(
        query.reshape(rows, kv_heads, groups * new, query.shape[3]),
        key,
        value,
        attn_mask=grouped_mask,
        dropout_p=dropout,
        scale=scaling,
    )
    return output.reshape(rows, heads, new, value.shape[3]).transpose(1, 2).contiguous(), None


def _is_groupable(query: Tensor, key: Tensor, mask: Tensor, extras: dict[str, Any]) -> bool:
    return (
        mask.dtype in (torch.bool, query.dtype)
        and mask.ndim == 4
        and mask.shape[1] == 1
        and query.shape[1] > key.shape[1]
        and 2 <= query.shape[2] <= MAX_POSITIONS
        and all(extras.get(name) is None for name in ("position_bias", "softcap", "s_aux"))
    )


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention_forward)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)

_lock = threading.Lock()
_users: Counter[int] = Counter()  # id of a config -> runs that use it now
_used: dict[int, PreTrainedConfig] = {}


def _renew() -> None:
    """In a forked process: the runs of other threads are gone, with the lock that they may have held."""
    global _lock
    _lock = threading.Lock()
    for config in _used.values():
        config._attn_implementation_internal = "sdpa"
    _used.clear()
    _users.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


@contextmanager
def grouped_attention(*models: PreTrainedModel) -> Iterator[None]:
    """
    Uses grouped attention inside the block where `models` run on transformers' sdpa attention, and restores sdpa after
    it. Nested and concurrent blocks over one model are counted: the last to end restores.
    """
    configs = [config for model in models for config in _switchable_configs(model)]
    with _lock:
        for config in configs:
            _users[id(config)] += 1
            _used[id(config)] = config
            config._attn_implementation_internal = GROUPED_ATTENTION
    try:
        yield
    finally:
        with _lock:
            for config in configs:
                _users[id(config)] -= 1
                if _users[id(config)] <= 0:  # below in a process that was forked inside the block
                    del _users[id(config)]
                    _used.pop(id(config), None)
                    config._attn_implementation_internal = "sdpa"


def _switchable_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs that the model's attention layers read, where these run on sdpa through `AttentionInterface`."""
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation in ("sdpa", GROUPED_ATTENTION):
            if type(module)._can_set_attn_implementation():  # kept on the class, whose source file it reads once
                configs[id(module.config)] = module.config
    return list(configs.values())
