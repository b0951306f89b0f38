"""The layers of a drafter: a block of slots attends to the context, which enters as keys and values only, and to
itself in both directions. One set of modules; what differs between target families are fields of the configuration.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..layers.slot_cache import SlotCache
from .configuration import DSparkConfig


class DSparkRotaryEmbedding(nn.Module):
    """Cosines and sines of absolute positions, each of shape `(rows, 1, tokens, head_dim)`."""

    inv_freq: Tensor
    original_inv_freq: Tensor

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.config = config
        self.rope_type = (config.rope_parameters or {}).get("rope_type", "default")
        inv_freq, self.attention_scaling = config.rope_frequencies()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: DSparkConfig, **kwargs: Any) -> tuple[Tensor, float]:
        """`PreTrainedModel._init_weights` calls this by name for the default type (Su et al. 2021)."""
        return config.rope_frequencies()

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = position_ids[:, None, :, None] * self.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_scaling != 1.0:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        return cos.to(dtype), sin.to(dtype)


def rotate(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turns `(rows, heads, tokens, head_dim)` by the cosines and sines of its positions."""
    cos, sin = rotary
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


def attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any) -> Tensor:
    """
    Scaled dot product attention that is never causal, of `(rows, heads, new, head_dim)` over `(rows, kv_heads,
    columns, head_dim)`. Where the mask, `(rows, 1, 1 or new, columns)`, is the same for all queries of a row, the
    query heads that share a key/value head become query rows, so that no key or value is copied.
    """
    sdpa = nn.functional.scaled_dot_product_attention
    groups = query.shape[1] // key.shape[1]
    if attention_mask is not None and attention_mask.shape[2] > 1:
        return sdpa(query, key, value, attention_mask, is_causal=False, enable_gqa=groups > 1, **settings)
    rows, _, new, head_dim = query.shape
    grouped = query.reshape(rows, key.shape[1], groups * new, head_dim)
    return sdpa(grouped, key, value, attention_mask, is_causal=False, **settings).reshape(query.shape)


@dataclass(frozen=True)
class Context:
    """Projected target features `(rows, tokens, hidden_size)`, and the cosines and sines of their positions."""

    features: Tensor
    rotary: tuple[Tensor, Tensor]


class DSparkAttention(nn.Module):
    """Attention of block slots over context and block."""

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.attention_dropout = config.attention_dropout
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.v_proj = None if config.value_from_key else nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_output_bias)
        self.q_norm, self.k_norm, self.v_norm = (
            nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps, elementwise_affine=has_weight) if is_used else None
            for is_used, has_weight in ((config.qk_norm, True), (config.qk_norm, True), (config.value_norm, False))
        )

    def keys_values(self, states: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of states `(rows, tokens, hidden_size)`, each `(rows, kv_heads, tokens, head_dim)`."""
        key_states = self._heads(self.k_proj(states))
        value_states = key_states if self.v_proj is None else self._heads(self.v_proj(states))
        key_states = key_states if self.k_norm is None else self.k_norm(key_states)
        value_states = value_states if self.v_norm is None else self.v_norm(value_states)
        return rotate(key_states, rotary), value_states

    def _heads(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:2], -1, self.head_dim).transpose(1, 2)

    def forward(
        self,
        states: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: SlotCache | None,
        context: Context | None,
    ) -> Tensor:
        query_states = self._heads(self.q_proj(states))
        query_states = query_states if self.q_norm is None else self.q_norm(query_states)
        query_states = rotate(query_states, rotary)
        key_states, value_states = self.keys_values(states, rotary)
        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states, self.layer_idx)
        elif context is not None:
            context_keys, context_values = self.keys_values(context.features, context.rotary)
            key_states = torch.cat([context_keys, key_states], dim=2)
            value_states = torch.cat([context_values, value_states], dim=2)
        dropout = self.attention_dropout if self.training else 0.0
        output = attend(query_states, key_states, value_states, attention_mask, scale=self.scaling, dropout_p=dropout)
        return self.o_proj(output.transpose(1, 2).flatten(2))


class DSparkMLP(nn.Module):
    """The gated MLP of the target's family."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(states)) * self.up_proj(states))


class DSparkLayer(nn.Module):
    """A pre-norm layer; with `sandwich_norms` the outputs of attention and MLP are normalised as well (Gemma)."""

    layer_scalar: Tensor
    input_layernorm: nn.RMSNorm
    post_attention_layernorm: nn.RMSNorm
    pre_feedforward_layernorm: nn.RMSNorm
    post_feedforward_layernorm: nn.RMSNorm

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DSparkAttention(config, layer_idx)
        self.mlp = DSparkMLP(config)
        self.is_sandwich = config.sandwich_norms
        names = ["input_layernorm", "post_attention_layernorm"]
        if self.is_sandwich:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
            self.register_buffer("layer_scalar", torch.ones(1))
        for name in names:
            setattr(self, name, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))

    def forward(
        self,
        states: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: SlotCache | None,
        context: Context | None,
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(states), rotary, attention_mask, cache, context)
        if not self.is_sandwich:
            states = states + attended
            return states + self.mlp(self.post_attention_layernorm(states))
        states = states + self.post_attention_layernorm(attended)
        states = states + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(states)))
        return states * self.layer_scalar
