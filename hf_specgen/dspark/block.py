"""One block of candidates: the context that the target's hidden states give, a pass over the block, and the heads.

Knows the target only where a checkpoint leaves embeddings or head to it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..engine.drafter import hidden_state_indices
from ..layers.slot_cache import SlotCache, SlotWrite
from .backbone import Context, DSparkAttention, DSparkLayer, DSparkRotaryEmbedding
from .checkpoint import DSparkPreTrainedModel
from .configuration import DSparkConfig
from .heads import MARKOV_HEADS, ConfidenceHead
from .target import borrowed, check_target

PLAIN_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class DSparkBlockModel(DSparkPreTrainedModel):
    """
    The modules of a drafter: embeddings, a projection of the target's hidden states, a few bidirectional layers, and
    the heads.

    Args:
        config ([`DSparkConfig`]): the configuration.
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

    def tapped_states(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """The hidden states that the drafter taps, side by side: `(rows, tokens, layers * hidden_size)`."""
        weight = self.fc.weight
        taps = [hidden_states[i].to(weight.device) for i in hidden_state_indices(self.config.target_layer_ids)]
        return torch.cat(taps, dim=-1).to(weight.dtype)

    def known_ids(self, token_ids: Tensor) -> Tensor:
        """Ids of a target whose vocabulary is padded further than the drafter's become 0."""
        return torch.where(token_ids < self.config.vocab_size, token_ids, 0)

    def draft_block(self, target: PreTrainedModel | None, cache: SlotCache, rows: slice, anchor_ids: Tensor) -> Tensor:
        """
        One pass over a block per row, behind each row's context; nothing of it stays in the cache.

        Args:
            target ([`~transformers.PreTrainedModel`], *optional*):
                Whose embeddings are used if the drafter has none.
            cache ([`SlotCache`]):
                The context keys and values of the rows.
            rows (`slice`):
                The rows of the cache.
            anchor_ids (`torch.LongTensor` of shape `(rows,)`):
                The tokens before the candidates, ids that the drafter knows.

        Returns:
            `torch.Tensor` of shape `(rows, num_candidates, hidden_size)`: the states of the slots that predict.
        """
        num_slots = self.config.block_size
        block_ids = anchor_ids.new_full((len(anchor_ids), num_slots), self.config.mask_token_id)
        block_ids[:, 0] = anchor_ids
        write = cache.begin(rows, torch.full((len(anchor_ids),), num_slots), num_slots, anchor_ids.device)
        mask = _block_mask(write, self.fc.weight.dtype)
        states = self(block_ids, write.position_ids, attention_mask=mask, cache=cache, target=target).last_hidden_state
        return states if self.config.sample_from_anchor else states[:, 1:]

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

    def check_target(self, target: PreTrainedModel) -> None:
        """Raises `ValueError` if the drafter cannot be for this target."""
        check_target(self.config, target, takes_tables=self.embed_tokens is None or self.lm_head is None)

    def _supports_logits_to_keep(self) -> bool:
        return False


def _block_mask(write: SlotWrite, dtype: torch.dtype) -> Tensor | None:
    """Every slot sees its row's context and all of the block: `(rows, 1, 1, columns)`, None if that is everything."""
    if write.common_start is not None:
        return None
    columns = torch.arange(write.width, device=write.columns.device)
    is_hidden = columns > write.columns[:, -1:]
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=columns.device)
    return mask.masked_fill_(is_hidden, torch.finfo(dtype).min)[:, None, None]
