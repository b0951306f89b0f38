"""DSparkModel: a block-parallel drafter for one target (DSpark, DeepSeek 2026, https://arxiv.org/abs/2607.05147).

It reads hidden states of the target, so it cannot generate alone: give it as `assistant_model` to the target's
`generate`, or to a [`Decoder`] as `DSparkDrafter(model)`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..layers.slot_cache import SlotCache
from .backbone import Context, DSparkAttention, DSparkLayer, DSparkRotaryEmbedding
from .checkpoint import DSparkPreTrainedModel
from .configuration import DSparkConfig
from .drafter import DSparkDrafter, make_drafter
from .heads import MARKOV_HEADS, ConfidenceHead
from .selfcheck import DSparkCheck, check_drafter
from .stock_assistant import AssistantOutput, generate_candidates
from .target import borrowed, check_target, head_of, settings_for_target

PLAIN_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class DSparkModel(DSparkPreTrainedModel):
    """
    The drafter: embeddings, a projection of the target's hidden states, a few bidirectional layers, and the heads.

    A checkpoint without token embeddings or head takes them from the target that it drafts for.

    Args:
        config ([`DSparkConfig`]): the configuration.

    Attributes:
        confidence_threshold (`float`): candidates are verified up to the first whose confidence is below this; read
            from the checkpoint's generation_config.json, 0 (all are verified) if that says nothing.
        calibration ([`Calibration`], *optional*): temperatures of the confidence head, read from
            confidence_calibration.json beside the checkpoint.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        config.validate()
        hidden_size, draft_vocab_size = config.hidden_size, config.draft_vocab_size or config.vocab_size
        self.embed_tokens: nn.Embedding | None = nn.Embedding(config.vocab_size, hidden_size)
        self.lm_head: nn.Linear | None = nn.Linear(hidden_size, draft_vocab_size, bias=False)
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden_size, hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden_size, eps=config.rms_norm_eps)
        self.norm = nn.RMSNorm(hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DSparkLayer(config, index) for index in range(config.num_hidden_layers)])
        self.rotary_emb = DSparkRotaryEmbedding(config)
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        if config.draft_vocab_size is not None:
            is_drafted = torch.arange(config.vocab_size) < draft_vocab_size
            self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", is_drafted)
        # transformers' own assisted loop reads this one; a threshold in it would be rewritten every round.
        self.generation_config = GenerationConfig(
            num_assistant_tokens=config.num_candidates,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        self.post_init()

    def context_features(self, target_states: Tensor) -> Tensor:
        """
        What the drafter sees of a token: `hidden_norm(fc(states))`.

        Args:
            target_states (`torch.Tensor` of shape `(rows, tokens, layers * hidden_size)`):
                The target's hidden states of `config.target_layer_ids`, side by side.
        """
        return self.hidden_norm(self.fc(target_states))

    def write_context(self, target_states: Tensor, cache: SlotCache, position_ids: Tensor) -> None:
        """Writes the context keys and values of tokens where `cache.begin` has prepared; same shapes as above."""
        features = self.context_features(target_states)
        rotary = self.rotary_emb(position_ids, features.dtype)
        for layer in self.layers:
            attention: DSparkAttention = layer.self_attn  # type: ignore[assignment]  # of a ModuleList
            cache.update(*attention.keys_values(features, rotary), attention.layer_idx)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        target_states: Tensor | None = None,
        context_position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: SlotCache | None = None,
        target: PreTrainedModel | None = None,
    ) -> BaseModelOutput:
        """
        The states of block slots.

        Args:
            input_ids (`torch.LongTensor` of shape `(rows, slots)`):
                Blocks: anchors and masks.
            position_ids (`torch.LongTensor` of shape `(rows, slots)`):
                Absolute positions; the anchor's is its index in the text.
            target_states (`torch.Tensor` of shape `(rows, tokens, layers * hidden_size)`, *optional*):
                Hidden states of the target for a pass without cache, with their positions in
                `context_position_ids` of shape `(rows, tokens)`.
            attention_mask (`torch.Tensor` of shape `(rows, 1, 1 or slots, tokens + slots)`, *optional*):
                True where attention is allowed. By default every slot sees everything.
            cache ([`SlotCache`], *optional*):
                Context keys and values of `write_context`, prepared by `begin` for the block.
            target ([`~transformers.PreTrainedModel`], *optional*):
                Whose embeddings are used if the drafter has none.

        Returns:
            [`~transformers.modeling_outputs.BaseModelOutput`] with `last_hidden_state` of shape `(rows, slots,
            hidden_size)`, behind the final norm.
        """
        states = self.embed(input_ids, target)
        rotary = self.rotary_emb(position_ids, states.dtype)
        context = None
        if target_states is not None:
            assert context_position_ids is not None, "context states come with their positions"
            features = self.context_features(target_states)
            context = Context(features, self.rotary_emb(context_position_ids, features.dtype))
        for layer in self.layers:
            states = layer(states, rotary, attention_mask, cache, context)
        return BaseModelOutput(last_hidden_state=self.norm(states))

    def embed(self, token_ids: Tensor, target: PreTrainedModel | None = None) -> Tensor:
        """Token embeddings `(..., hidden_size)`, the target's if the drafter has none."""
        table = borrowed(target, "get_input_embeddings") if self.embed_tokens is None else self.embed_tokens
        own, weight = self.fc.weight, table.weight
        embeddings = nn.functional.embedding(token_ids.to(weight.device), weight).to(own.device, own.dtype)
        scale = self.config.embedding_scale
        if scale == 1.0:
            return embeddings
        return embeddings * torch.tensor(scale, dtype=own.dtype).item()  # rounded as Gemma rounds it

    def base_logits(self, states: Tensor, target: PreTrainedModel | None = None) -> Tensor:
        """Logits `(..., draft_vocab)` before the Markov head, in fp32; the target's head if the drafter has none."""
        head = borrowed(target, "get_output_embeddings") if self.lm_head is None else self.lm_head
        dtype = (
            head.weight.dtype if head.weight.dtype in PLAIN_TYPES else states.dtype
        )  # a quantized head casts itself
        logits = head(states.to(head.weight.device, dtype)).to(states.device, torch.float32)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def unroll(
        self,
        states: Tensor,
        base_logits: Tensor,
        anchor_ids: Tensor,
        choose: Callable[[int, Tensor], Tensor],
        has_confidence: bool = True,
    ) -> Tensor | None:
        """
        Goes through a block from left to right; the Markov head makes each candidate depend on the one before.

        Args:
            states (`torch.Tensor` of shape `(rows, k, hidden_size)`):
                States of the slots that predict.
            base_logits (`torch.Tensor` of shape `(rows, k, draft_vocab)`):
                Their logits.
            anchor_ids (`torch.LongTensor` of shape `(rows,)`):
                The tokens before the first candidates.
            choose (`Callable[[int, Tensor], Tensor]`):
                Called with the number of the candidate, from 0, and its corrected logits of shape `(rows, vocab)` over
                the target's vocabulary; returns the chosen ids of shape `(rows,)`.
            has_confidence (`bool`, *optional*, defaults to `True`):
                Whether confidences are wanted.

        Returns:
            Confidence logits of shape `(rows, k)`, each computed before its candidate was chosen; None if they are not
            wanted or there is no confidence head.
        """
        previous_ids, memory, embedding = anchor_ids, None, None
        markov_head, confidence_head = self.markov_head, self.confidence_head if has_confidence else None
        sees_embedding = self.config.confidence_head_with_markov
        is_reduced = self.config.draft_vocab_size is not None
        confidences = []
        for index in range(states.shape[1]):
            logits = base_logits[:, index]
            if markov_head is not None:
                embedding = markov_head.embed(previous_ids)
                bias, memory = markov_head.step(embedding, states[:, index], memory)
                logits = logits + bias
            if confidence_head is not None:
                confidences.append(confidence_head(states[:, index], embedding if sees_embedding else None))
            previous_ids = choose(index, self.over_target_vocab(logits) if is_reduced else logits)
        return torch.stack(confidences, dim=1) if confidences else None

    def over_target_vocab(self, logits: Tensor) -> Tensor:
        """Logits `(..., draft_vocab)` over a reduced vocabulary as `(..., vocab)`; ids outside it get -inf."""
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return full.index_copy(-1, self.target_ids(), logits)

    def target_ids(self) -> Tensor:
        """The target's id of every id of a reduced vocabulary, `(draft_vocab,)`."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def make_drafter(self, generation_config: GenerationConfig) -> DSparkDrafter:
        """
        The drafter for one call of `generate` on a model with speculation enabled.

        Args:
            generation_config ([`~transformers.GenerationConfig`]):
                Its `num_assistant_tokens` cuts how much of each block is verified, its
                `assistant_confidence_threshold` replaces the drafter's own.

        Raises:
            `ValueError`: for settings outside what the drafter can do.
        """
        return make_drafter(self, generation_config)

    def generate(self, input_ids: Tensor, **kwargs: Any) -> AssistantOutput:
        """
        Called by transformers' assisted decoding, not by users: the candidates of one round for an untouched target.
        """
        return generate_candidates(self, input_ids, **kwargs)

    def _supports_logits_to_keep(self) -> bool:
        return False

    def check(self, target: PreTrainedModel, tokenizer: Any, prompts: list[str] | None = None) -> DSparkCheck:
        """
        Drafts for a few prompts and tells why candidates are refused, if nearly all are: see [`DSparkCheck`].

        Args:
            target ([`~transformers.PreTrainedModel`]):
                The model to draft for.
            tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
                Its tokenizer.
            prompts (`list[str]`, *optional*):
                Texts of the kind that the drafter was trained for; some built-in ones by default.
        """
        return check_drafter(self, target, tokenizer, prompts)

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
        check_target(model, target)
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
        check_target(self, target)
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


AutoConfig.register("dspark", DSparkConfig)
AutoModel.register(DSparkConfig, DSparkModel)
