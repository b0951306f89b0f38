"""DSparkModel: a block-parallel drafter for one target (DSpark, DeepSeek 2026, https://arxiv.org/abs/2607.05147).

It reads hidden states of the target, so it cannot generate alone: give it as `assistant_model` to the target's
`generate`, or to a [`Decoder`] as `DSparkDrafter(model)`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from .configuration import DSparkConfig
from .stock_assistant import StockAssistant
from .target import head_of, settings_for_target


class DSparkModel(StockAssistant):
    """
    The drafter. A checkpoint without token embeddings or head takes them from the target that it drafts for.

    Args:
        config ([`DSparkConfig`]): the configuration.

    Attributes:
        confidence_threshold (`float`): candidates are verified up to the first whose confidence is below this; read
            from the checkpoint's generation_config.json, 0 (all are verified) if that says nothing.
        calibration ([`Calibration`], *optional*): temperatures of the confidence head, read from
            confidence_calibration.json beside the checkpoint.
    """

    @classmethod
    def from_target(cls, target: PreTrainedModel, mask_token_id: int, **settings: Any) -> "DSparkModel":
        """
        An untrained drafter for a target: its embedding and head are copies of the target's, the rest is random. A
        `draft_vocab_size` reduces its vocabulary to the target's first ids.

        Args:
            target ([`~transformers.PreTrainedModel`]):
                The model to draft for.
            mask_token_id (`int`):
                An id that does not occur in texts.
            settings (`dict[str, Any]`, *optional*):
                Fields of [`DSparkConfig`]. By default 5 layers like the target's, blocks of 7, five tapped layers, a
                vanilla Markov head of rank 256, and a confidence head that sees it.

        Raises:
            `ValueError`: for settings that do not fit together or to the target.
        """
        config = DSparkConfig(**settings_for_target(target, mask_token_id, settings))
        model = cls(config).to(target.device, target.dtype)
        model.check_target(target)
        with torch.no_grad():
            assert model.embed_tokens is not None and model.lm_head is not None
            model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
            model.lm_head.weight.copy_(head_of(target).weight[: len(model.lm_head.weight)])
        return model

    def share_weights(self, target: PreTrainedModel) -> "DSparkModel":
        """
        Makes embedding and head the target's own tensors where they are absent or equal to them, which saves memory.
        Both models must then stay on one device and in one type; freeze neither without the other.

        Returns:
            The same object.
        """
        self.check_target(target)
        tables = {"embed_tokens": target.get_input_embeddings(), "lm_head": head_of(target)}
        for name, table in tables.items():
            own = getattr(self, name)
            if own is None:
                rows, columns = table.weight.shape
                with torch.device("meta"):
                    own = nn.Embedding(rows, columns) if name == "embed_tokens" else nn.Linear(columns, rows, False)
                setattr(self, name, own)
                own.weight = table.weight
            elif own.weight.shape == table.weight.shape and torch.equal(own.weight.to(table.weight), table.weight):
                own.weight = table.weight
        return self

    def foreign_tables(self, target: PreTrainedModel) -> list[str]:
        """Those of `embed_tokens` and `lm_head` that the drafter has of its own and that do not equal the target's."""
        pairs: dict[str, tuple[Any, Any]] = {"embed_tokens": (self.embed_tokens, target.get_input_embeddings())}
        if self.config.draft_vocab_size is None:
            pairs["lm_head"] = (self.lm_head, head_of(target))
        return [
            name for name, (own, other) in pairs.items() if own is not None and not _is_copy(own.weight, other.weight)
        ]


def _is_copy(table: Tensor, other: Tensor) -> bool:
    """Whether the rows that both have are equal in the type of `table`."""
    rows = min(len(table), len(other))
    return table.shape[1] == other.shape[1] and torch.equal(table[:rows], other[:rows].to(table))


AutoConfig.register("dspark", DSparkConfig)
AutoModel.register(DSparkConfig, DSparkModel)
