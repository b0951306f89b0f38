"""Tiny targets and DSpark drafters for them whose candidates are partly accepted, made without training.

The targets' next token depends mostly on the one before. A drafter's Markov head holds a low-rank table of these
bigrams; its random layers, which see the context, disturb them.
"""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma4TextConfig, PreTrainedModel

from hf_specgen import DSparkModel
from tests.support.models import FAMILIES, make_model

SMALL = {"num_hidden_layers": 2, "block_size": 4, "markov_rank": 4}
MASK = 60
HEADS = ("vanilla", "gated", "rnn")
LINEAR_PART = 0.15  # of tanh: how far from 0 the outputs of the rnn head lie


def bigram_target(family: str = "llama", **settings) -> PreTrainedModel:
    """A target of `conftest.make_model` in which attention counts for little."""
    model = make_model(family, **settings)
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma normalises what attention gives
                layer.post_attention_layernorm.weight.fill_(0.6 - 1)
            else:
                layer.self_attn.o_proj.weight.mul_(0.04)
    return model


@torch.no_grad()
def bigram_logits(target: PreTrainedModel) -> torch.Tensor:
    """Logits behind each token alone, of shape `(vocab, vocab)`, with a mean of 0 in every row."""
    logits = target(input_ids=torch.arange(target.config.vocab_size)[:, None]).logits[:, 0].float()
    return logits - logits.mean(dim=-1, keepdim=True)


def fitted_drafter(
    target: PreTrainedModel, head: str = "vanilla", noise: float = 0.25, seed: int = 0, **settings
) -> DSparkModel:
    """
    A drafter for a target of `bigram_target`.

    Args:
        target: the target.
        head: the kind of its Markov head.
        noise: the spread of the base logits, as a share of that of the bigrams.
        settings: fields of its configuration.
    """
    vocab_size, depth = target.config.vocab_size, target.config.num_hidden_layers
    rank = min(24, vocab_size)
    defaults = {
        "num_hidden_layers": 2,
        "block_size": 4,
        "target_layer_ids": list(range(-1, depth - 1)),
        "markov_rank": rank,
        "markov_head_type": head,
    }
    torch.manual_seed(seed)
    model = DSparkModel.from_target(target, mask_token_id=0, **{**defaults, **settings}).eval()
    generator = torch.Generator().manual_seed(seed)
    bigrams = bigram_logits(target)
    with torch.no_grad():
        for layer in model.layers:
            for parameter in layer.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(8.0)
        if model.config.draft_vocab_size is not None:
            _reduce_vocabulary(model, target, bigrams)
            bigrams = bigrams[:, model.t2d]
        model.norm.weight.fill_(noise * bigrams.std() / model.lm_head.weight.norm(dim=-1).mean())
        if model.markov_head is not None:
            _fit(model.markov_head, bigrams, generator)
        if model.confidence_head is not None:
            _spread_confidences(model, generator)
    return model


def _reduce_vocabulary(model: DSparkModel, target: PreTrainedModel, bigrams: torch.Tensor) -> None:
    """Drafts the ids that are likely on the whole, among them the highest."""
    kept_ids = bigrams.softmax(dim=-1).mean(dim=0).topk(model.config.draft_vocab_size).indices.sort().values
    model.d2t.copy_(kept_ids - torch.arange(len(kept_ids)))
    model.t2d.zero_()
    model.t2d[kept_ids] = True
    model.lm_head.weight.copy_(target.get_output_embeddings().weight[kept_ids])


def _fit(head: nn.Module, bigrams: torch.Tensor, generator: torch.Generator) -> None:
    """Makes `step` return about `bigrams`, by way of gates and memories that matter a little."""
    left, values, right = torch.linalg.svd(bigrams, full_matrices=False)
    rank = min(head.markov_w1.weight.shape[1], len(values))
    embeddings = torch.zeros_like(head.markov_w1.weight)
    embeddings[:, :rank] = left[:, :rank] * values[:rank]
    outputs = torch.zeros_like(head.markov_w2.weight)
    outputs[:, :rank] = right[:rank].T
    scale = embeddings.abs().max()
    embeddings, outputs = embeddings / scale, outputs * scale
    if hasattr(head, "gate_proj"):
        head.gate_proj.weight.copy_(torch.randn(head.gate_proj.weight.shape, generator=generator) * 0.3)
        head.gate_proj.bias.fill_(1.5)
        outputs = outputs / torch.tensor(1.5).sigmoid()
    if hasattr(head, "joint_proj"):
        width = head.markov_w1.weight.shape[1]
        weight = torch.randn(head.joint_proj.weight.shape, generator=generator) * 0.3
        output = weight[2 * width :]
        output *= LINEAR_PART / 4
        output[:, width : 2 * width] += torch.eye(width) * LINEAR_PART
        head.joint_proj.weight.copy_(weight)
        head.joint_proj.bias.zero_()
        outputs = outputs / LINEAR_PART
    head.markov_w1.weight.copy_(embeddings)
    head.markov_w2.weight.copy_(outputs)


def _spread_confidences(model: DSparkModel, generator: torch.Generator) -> None:
    """Confidences on both sides of a half, which depend on the token before and a little on the context."""
    proj, hidden_size = model.confidence_head.proj, model.config.hidden_size
    weight = torch.randn(proj.weight.shape, generator=generator)
    weight[:, :hidden_size] *= 0.5 / (model.norm.weight.mean() * hidden_size**0.5)
    proj.bias.fill_(0.8)
    if proj.weight.shape[1] > hidden_size:
        of_tokens = model.markov_head.markov_w1.weight @ weight[0, hidden_size:]
        weight[:, hidden_size:] *= 1.5 / of_tokens.std()
        proj.bias -= 1.5 * of_tokens.mean() / of_tokens.std()
    proj.weight.copy_(weight)


def drafter_for(target, seed: int = 0, **settings) -> DSparkModel:
    """An untrained drafter without any parameter at 0 or 1."""
    torch.manual_seed(seed)
    model = DSparkModel.from_target(target, MASK, **SMALL | settings).eval()
    tables = {id(model.embed_tokens.weight), id(model.lm_head.weight)}
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) not in tables:
                parameter.normal_(mean=1.0 if parameter.ndim == 1 else 0.0, std=0.2)
    return model


def gemma4_target(key_equals_value: bool, **settings):
    config = Gemma4TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=key_equals_value,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=64,
        max_position_embeddings=256,
        sliding_window=8,
        final_logit_softcapping=30.0,
        **settings,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def states_of(model: DSparkModel, target=None) -> torch.Tensor:
    """What a drafter makes of fixed random context and block."""
    generator = torch.Generator().manual_seed(7)
    width = len(model.config.target_layer_ids) * model.config.hidden_size
    context = torch.randn(1, 6, width, generator=generator).to(model.dtype)
    block = torch.tensor([[5] + [MASK] * (model.config.block_size - 1)])
    positions = torch.arange(6, 6 + model.config.block_size)[None]
    hidden = model(block, positions, context, torch.arange(6)[None], target=target).last_hidden_state
    return model.base_logits(hidden, target)


def all_targets():
    return [*FAMILIES, "gemma4", "gemma4-k-eq-v"]


def target_of(family: str):
    return gemma4_target(family == "gemma4-k-eq-v") if family.startswith("gemma4") else make_model(family)
