"""DSparkConfig: one set of fields for every target family; what the layouts of published files say is read into it."""

import math
import os
from dataclasses import field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import CONFIG_NAME

from ..arguments import check_count, shown
from ..engine.limits import CANDIDATE_COLUMNS
from .checkpoint_files import HUB_KWARGS, found_file, read_json_object
from .field_kinds import KINDS, check_fields, check_rope
from .layouts import LAYOUTS, read_layout, write_layout

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
ROPE_TYPES_BY_LENGTH = ("dynamic", "longrope")


class DSparkConfig(PreTrainedConfig):
    r"""
    Configuration of a DSpark (or DFlash) drafter.

    The target families differ in these fields alone: a Qwen3 drafter sets `qk_norm`, a Qwen2 drafter `attention_bias`,
    a Gemma4 drafter `sandwich_norms`, `value_norm`, `attention_scale`, `embedding_scale` and perhaps `value_from_key`
    and `final_logit_softcapping`.

    Args:
        block_size (`int`, defaults to 7):
            Input slots of a block: the anchor and masks.
        mask_token_id (`int`):
            The id that fills the slots behind the anchor.
        target_layer_ids (`list[int]`):
            Target layers whose output is tapped, counted from 0; -1 is the embedding output. Strictly increasing; the
            last layer cannot be tapped, since transformers gives its output only after the final norm.
        num_target_layers (`int`, *optional*):
            The target's depth.
        sample_from_anchor (`bool`, defaults to `True`):
            Whether the anchor's slot predicts the first candidate (DSpark), so that a block gives `block_size`
            candidates. Otherwise (z-lab's DFlash) it predicts nothing, and a block gives `block_size - 1`.
        markov_rank (`int`, defaults to 0):
            Rank of the Markov head, 0 for none.
        markov_head_type (`str`, defaults to `"vanilla"`):
            `"vanilla"`, `"gated"` or `"rnn"`.
        enable_confidence_head, confidence_head_with_markov (`bool`, defaults to `False`):
            Whether the drafter estimates the acceptance of its candidates, and whether from the previous token too.
        draft_vocab_size (`int`, *optional*):
            Size of a reduced vocabulary that is drafted from; by default the whole one.
        num_anchors (`int`, defaults to 512):
            Blocks per sequence in training.
        qk_norm (`bool`, defaults to `True`):
            Whether queries and keys are normalised per head.
        attention_bias, attention_output_bias, mlp_bias (`bool`, defaults to `False`):
            Biases of the query, key and value projections, of the output projection, and of the MLP.
        attention_scale (`float`, *optional*):
            What the attention scores are multiplied by, `head_dim ** -0.5` by default.
        value_norm, value_from_key (`bool`, defaults to `False`):
            Whether values are normalised, without weight, and whether they are the key projection's output.
        sandwich_norms (`bool`, defaults to `False`):
            Whether the outputs of attention and MLP are normalised too, and the layer's output is scaled.
        embedding_scale (`float`, defaults to 1.0):
            What token embeddings are multiplied by.
        final_logit_softcapping (`float`, *optional*):
            Bound of a tanh over the base logits, before the Markov head adds to them.
        published_config (`dict`, *optional*):
            What the published file says beyond all this; written back with it.
        vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
        head_dim, hidden_act, rms_norm_eps, rope_parameters, max_position_embeddings, layer_types, sliding_window,
        initializer_range, attention_dropout, bos_token_id, eos_token_id, pad_token_id, tie_word_embeddings:
            As in [`~transformers.Qwen3Config`], of the drafter's own layers.

    Raises:
        `ValueError`: for values that do not fit together.
    """

    model_type = "dspark"

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    attention_dropout: float = 0.0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    block_size: int = 7
    mask_token_id: int = 0
    target_layer_ids: list[int] = field(default_factory=list)
    num_target_layers: int | None = None
    sample_from_anchor: bool = True
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    draft_vocab_size: int | None = None
    num_anchors: int = 512

    qk_norm: bool = True
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float | None = None
    value_norm: bool = False
    value_from_key: bool = False
    sandwich_norms: bool = False
    embedding_scale: float = 1.0
    final_logit_softcapping: float | None = None
    layer_types: list[str] = field(default_factory=list)
    tie_word_embeddings: bool = False
    published_config: dict | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        check_fields({**kwargs, "num_hidden_layers": self.num_hidden_layers})  # before what makes lists of them
        if not self.layer_types:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)
        if self.draft_vocab_size == self.vocab_size:
            self.draft_vocab_size = None
        if self.target_layer_ids:  # transformers also makes configurations that say nothing
            self.validate()

    @property
    def num_candidates(self) -> int:
        """How many candidates a block gives."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def checked_num_assistant_tokens(self, count: int) -> int:
        """Returns a number of candidates to verify, or raises if a block does not give as many."""
        if check_count("num_assistant_tokens", count) > self.num_candidates:
            raise ValueError(
                f"`num_assistant_tokens` has to be at most {self.num_candidates}, which is what a block of this "
                f"drafter gives, but is {count}."
            )
        return count

    def validate(self) -> None:
        """Raises `ValueError` in a sentence where fields are wrong or do not fit together."""
        check_fields({name: getattr(self, name) for name in KINDS if hasattr(self, name)})
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_key_value_heads` has to divide the `num_attention_heads` of {self.num_attention_heads}, but is "
                f"{self.num_key_value_heads}."
            )
        if self.num_candidates < 1:
            raise ValueError("`block_size` has to be at least 2 where the anchor's slot predicts nothing, but is 1.")
        if self.num_candidates >= CANDIDATE_COLUMNS:
            raise ValueError(
                f"`block_size` has to give fewer than {CANDIDATE_COLUMNS} candidates, but gives {self.num_candidates}."
            )
        self._check_target_layer_ids()
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` has to be an id below the `vocab_size` of {self.vocab_size}, but is "
                f"{self.mask_token_id!r}."
            )
        if self.markov_rank and self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ValueError(
                f"`markov_head_type` has to be one of {MARKOV_HEAD_TYPES}, but is {shown(self.markov_head_type)}."
            )
        if self.enable_confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise ValueError("`confidence_head_with_markov` needs a Markov head, but `markov_rank` is 0.")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` has to be between 1 and the `vocab_size` of {self.vocab_size}, but is "
                f"{self.draft_vocab_size!r}."
            )
        if set(self.layer_types) != {"full_attention"} or len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_types` has to name 'full_attention' for each of {self.num_hidden_layers} layers, but is "
                f"{shown(self.layer_types)}; drafters with sliding windows are not supported."
            )
        self._check_rope()

    def _check_rope(self) -> None:
        check_rope(self.rope_parameters)
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type in ROPE_TYPES_BY_LENGTH:
            raise ValueError(
                f"`rope_parameters` are of type {rope_type!r}, whose frequencies change with the length; context keys "
                "are computed once, so give the drafter another type."
            )
        try:
            with torch.device("cpu"):  # a model may just be made without memory
                frequencies, scaling = self.rope_frequencies()
        except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"`rope_parameters` {shown(self.rope_parameters)} are not those of type {rope_type!r}: {error!r}."
            ) from error
        is_usable = bool(((frequencies >= 0) & frequencies.isfinite()).all()) and math.isfinite(scaling)
        if not is_usable or len(frequencies) != self.head_dim // 2:
            raise ValueError(
                f"`rope_parameters` {shown(self.rope_parameters)} do not give a frequency for each pair of the "
                f"`head_dim` of {self.head_dim}."
            )

    def rope_frequencies(self) -> tuple[Tensor, float]:
        """The inverse frequencies of the rotary embedding, `(head_dim / 2,)`, and the factor of cosine and sine."""
        parameters = self.rope_parameters or {}
        if (rope_type := parameters.get("rope_type", "default")) in ROPE_INIT_FUNCTIONS:
            return ROPE_INIT_FUNCTIONS[rope_type](self)
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float) / self.head_dim
        return 1.0 / parameters.get("rope_theta", 10000.0) ** exponents, 1.0

    def _check_target_layer_ids(self) -> None:
        ids = self.target_layer_ids
        if not ids or ids[0] < -1 or any(a >= b for a, b in zip(ids, ids[1:])):
            raise ValueError(
                "`target_layer_ids` has to hold strictly increasing layer numbers from -1 (the embedding output) on, "
                f"but is {shown(ids)}."
            )
        if self.num_target_layers is not None:
            check_tapped_layers(ids, self.num_target_layers)

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The fields that a checkpoint's config.json gives, whatever its layout."""
        hub_kwargs = {name: kwargs[name] for name in HUB_KWARGS if name in kwargs}
        if (path := found_file(pretrained_model_name_or_path, CONFIG_NAME, hub_kwargs)) is not None:
            read_json_object(path)  # refuses what transformers trips over
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return read_layout(config_dict), kwargs

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> "DSparkConfig":
        """As that of transformers; a `ValueError` says which checkpoint cannot be used and why."""
        try:
            return super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        except OSError:
            raise
        except Exception as error:  # transformers has several of its own
            raise ValueError(
                f"The configuration of `{pretrained_model_name_or_path}` cannot be used: {str(error).rstrip('.')}."
            ) from error

    def to_layout(self, layout: str) -> dict[str, Any]:
        """
        The contents of config.json in one of the published layouts.

        Args:
            layout (`str`): one of `LAYOUTS`.

        Raises:
            `ValueError`: if the layout is unknown, or cannot express this drafter.
        """
        if layout not in LAYOUTS:
            raise ValueError(f"`layout` has to be one of {LAYOUTS}, but is {layout!r}.")
        return write_layout(self.to_dict(), layout)


def check_tapped_layers(layer_ids: list[int], num_target_layers: int) -> None:
    """Raises `ValueError` if a target of that depth does not have these layers to tap."""
    if layer_ids[-1] >= num_target_layers - 1:
        what = "the last layer" if layer_ids[-1] == num_target_layers - 1 else "a layer outside the target"
        raise ValueError(
            f"`target_layer_ids` {shown(layer_ids)} name {what}: of {num_target_layers} layers those from 0 to "
            f"{num_target_layers - 2} can be tapped (-1 is the embedding output). vLLM, speculators and GGUF files "
            "count from 1."
        )
