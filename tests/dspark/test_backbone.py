"""Layers and positions against those of transformers."""

import copy

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from hf_specgen import DSparkDrafter, DSparkModel, enable_speculation
from hf_specgen.dspark.backbone import attend
from tests.support.dspark_models import (
    MASK,
    SMALL,
    drafter_for,
    gemma4_target,
    target_of,
)
from tests.support.models import left_padded, make_model

IDS = torch.tensor([[5, 6, 7, 9]])


@pytest.fixture(scope="module")
def target():
    return make_model("qwen3", num_hidden_layers=4)


@pytest.fixture
def model(target):
    return drafter_for(target)


# Attention and positions


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1000000.0}


@pytest.mark.parametrize("rope", [DEFAULT, YARN, LLAMA3, LINEAR], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_cosines_equal_those_of_transformers(family, rope):
    target = make_model(family, rope_parameters=dict(rope), head_dim=16)
    model = DSparkModel.from_target(target, MASK, **SMALL)
    config_class, reference = {
        "qwen3": (Qwen3Config, Qwen3RotaryEmbedding),
        "llama": (LlamaConfig, LlamaRotaryEmbedding),
    }[family]
    assert isinstance(target.config, config_class)
    positions = torch.tensor([[0, 1, 5, 200], [3, 17, 100, 255]])
    expected = reference(target.config)(torch.zeros(2, 4, 32), positions)
    for found, wanted in zip(model.rotary_emb(positions, torch.float32), expected):
        assert found.shape == (2, 1, 4, 16)
        torch.testing.assert_close(found[:, 0], wanted, rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True}),
        ("qwen2", {}),
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": dict(LLAMA3)}),
        ("mistral", {"sliding_window": None, "head_dim": 16}),
        ("gemma4", {}),
        ("gemma4-k-eq-v", {}),
    ],
    ids=str,
)
def test_layers_without_context_equal_those_of_the_family(family, settings):
    """A block alone, seen in both directions, goes through layers as transformers computes them."""
    if family.startswith("gemma4"):
        target = gemma4_target(family == "gemma4-k-eq-v", layer_types=["full_attention"] * 6)
    else:
        target = make_model(family, num_hidden_layers=4, **settings)
    model = drafter_for(target, num_hidden_layers=target.config.num_hidden_layers)
    decoder = copy.deepcopy(target.get_decoder())
    tensors = {n: t for n, t in model.state_dict().items() if n.startswith(("layers.", "norm."))}
    missing, unexpected = decoder.load_state_dict(tensors, strict=False)
    assert not unexpected and not [name for name in missing if name.startswith(("layers.", "norm."))]
    block, positions = torch.tensor([[5, 8, MASK, MASK]]), torch.arange(11, 15)[None]
    everything = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask = {"full_attention": everything} if family.startswith("gemma4") else everything
    embeddings = target.get_input_embeddings()(block)
    expected = decoder(
        inputs_embeds=embeddings, position_ids=positions, attention_mask=mask, use_cache=False
    ).last_hidden_state
    found = model(block, positions).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_positions_matter_by_their_difference_only(model):
    """Absolute positions of context and block, moved together, change nothing; the block alone does."""
    generator = torch.Generator().manual_seed(0)
    context = torch.randn(1, 6, 96, generator=generator)
    block = torch.tensor([[5, MASK, MASK, MASK]])

    @torch.no_grad()
    def states(context_start: int, block_start: int) -> torch.Tensor:
        context_ids = torch.arange(context_start, context_start + 6)[None]
        return model(block, torch.arange(block_start, block_start + 4)[None], context, context_ids).last_hidden_state

    torch.testing.assert_close(states(100, 106), states(0, 6), rtol=0, atol=1e-4)
    assert (states(0, 5) - states(0, 6)).abs().max() > 1e-3


@torch.no_grad()
def test_attention_without_a_mask_sees_later_slots(model):
    generator = torch.Generator().manual_seed(0)
    context, context_ids = torch.randn(1, 6, 96, generator=generator), torch.arange(6)[None]
    positions = torch.arange(6, 10)[None]
    first = model(torch.tensor([[5, MASK, MASK, 8]]), positions, context, context_ids).last_hidden_state
    second = model(torch.tensor([[5, MASK, MASK, 9]]), positions, context, context_ids).last_hidden_state
    assert (first[0, :3] - second[0, :3]).abs().amax(dim=-1).min() > 1e-4
    everything = torch.ones(1, 1, 4, 10, dtype=torch.bool)
    for mask in (everything, everything[:, :, :1]):
        masked = model(torch.tensor([[5, MASK, MASK, 8]]), positions, context, context_ids, mask).last_hidden_state
        torch.testing.assert_close(masked, first, rtol=0, atol=1e-5)


@torch.no_grad()
def test_masked_context_is_not_seen(model):
    """As in training, where a block sees the context before its anchor and itself."""
    context = torch.randn(1, 6, 96, generator=torch.Generator().manual_seed(0))
    block, positions, context_ids = torch.tensor([[5, MASK, MASK, MASK]]), torch.arange(3, 7)[None], torch.arange(6)
    short = model(block, positions, context[:, :3], context_ids[None, :3]).last_hidden_state
    allowed = torch.ones(1, 1, 4, 10, dtype=torch.bool)
    allowed[..., 3:6] = False
    for mask in (allowed, allowed[:, :, :1]):
        found = model(block, positions, context, context_ids[None], mask).last_hidden_state
        torch.testing.assert_close(found, short, rtol=0, atol=1e-5)


def naive_attention(query, key, value, mask, scale):
    """One head at a time, each query head with the key head of its group."""
    groups = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // groups].transpose(1, 2) * scale
        if mask is not None:
            allowed = mask[:, 0].expand_as(scores)
            scores = scores.masked_fill(~allowed, -torch.inf) if mask.dtype == torch.bool else scores + mask[:, 0]
        heads.append(scores.softmax(dim=-1) @ value[:, head // groups])
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize("kind", ["none", "shared", "own", "additive"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_grouped_attention_equals_a_naive_one(heads, kind):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, heads[0], 5, 8, generator=generator)
    key, value = (torch.randn(3, heads[1], 9, 8, generator=generator) for _ in range(2))
    allowed = torch.rand(3, 1, 5 if kind == "own" else 1, 9, generator=generator) < 0.6
    allowed[..., 0] = True
    mask = {"none": None, "additive": torch.zeros(allowed.shape).masked_fill(~allowed, -1e9)}.get(kind, allowed)
    found = attend(query, key, value, mask, scale=0.3)
    torch.testing.assert_close(found, naive_attention(query, key, value, mask, 0.3), rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma4", "gemma4-k-eq-v"])
def test_context_in_a_cache_equals_context_at_once(family):
    """Written in two pieces, as rounds do; the block leaves nothing behind."""
    model = drafter_for(target_of(family))
    width = len(model.config.target_layer_ids) * 32
    context = torch.randn(1, 7, width, generator=torch.Generator().manual_seed(0))
    block, positions = torch.tensor([[5, MASK, MASK, MASK]]), torch.arange(7, 11)[None]
    expected = model(block, positions, context, torch.arange(7)[None]).last_hidden_state
    cache, row = DSparkDrafter(model).make_cache(1), slice(0, 1)
    for start, end in ((0, 3), (3, 7)):
        count = torch.tensor([end - start])
        write = cache.begin(row, count, end - start, model.device)
        assert write.position_ids.tolist() == [list(range(start, end))]
        model.write_context(context[:, start:end], cache, write.position_ids)
        cache.advance(row, count)
        length = torch.tensor([4])
        write = cache.begin(row, length, 4, model.device)
        found = model(block, write.position_ids, cache=cache).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_gemma4_embeddings_are_scaled_masks_too():
    model = drafter_for(gemma4_target(True))
    embedded = model.embed(torch.tensor([5, MASK]))
    torch.testing.assert_close(embedded, model.embed_tokens.weight[[5, MASK]] * 32**0.5, rtol=1e-6, atol=1e-6)
    scale = torch.tensor(32**0.5).bfloat16()
    rounded = model.bfloat16().embed(torch.tensor([5]))
    assert torch.equal(rounded, model.embed_tokens.weight[[5]] * scale)


def test_left_padded_batches_of_a_new_drafter(target, model):
    batch = left_padded([3, 7, 5], vocab_size=60)
    plain = target.generate(**batch, max_new_tokens=12, do_sample=False)
    enabled = enable_speculation(copy.deepcopy(target))
    found = enabled.generate(**batch, assistant_model=model, max_new_tokens=12, do_sample=False)
    assert found.tolist() == plain.tolist()


def test_drafter_is_no_model_that_generates_alone(model):
    with pytest.raises(TypeError, match="cannot generate alone: give it to its target"):
        model.generate(IDS)
    assert not model.can_generate()
