import copy
import threading

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_specgen import CausalLMDrafter, Decoder, Request
from hf_specgen.layers import attention
from hf_specgen.layers.attention import GROUPED_ATTENTION, MAX_POSITIONS, grouped_attention, grouped_attention_forward
from tests.support.models import left_padded, make_model


class Layer(nn.Module):
    """What the attention functions read of a layer."""

    is_causal = True

    def __init__(self, groups: int):
        super().__init__()
        self.num_key_value_groups = groups


def states(groups: int, new: int, kv_heads: int = 2, columns: int = 37, rows: int = 3):
    generator = torch.Generator().manual_seed(groups * 100 + new)
    query = torch.randn(rows, kv_heads * groups, new, 8, generator=generator)
    key, value = torch.randn(2, rows, kv_heads, columns, 8, generator=generator)
    starts = torch.randint(0, columns - new + 1, (rows, 1), generator=generator)
    positions = (starts + torch.arange(new))[:, None, :, None]
    return query, key, value, torch.arange(columns) <= positions


@pytest.fixture
def delegated(monkeypatch):
    """How many calls went to transformers' own function."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setattr(attention, "sdpa_attention_forward", counted)
    return calls


@pytest.mark.parametrize("scaling", [None, 0.2])
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_same_numbers_as_transformers(groups, scaling, delegated):
    for new in range(1, 21):
        query, key, value, mask = states(groups, new)
        expected, _ = sdpa_attention_forward(Layer(groups), query, key, value, mask, scaling=scaling)
        found, weights = grouped_attention_forward(Layer(groups), query, key, value, mask, scaling=scaling)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert found.shape == expected.shape and found.is_contiguous() and weights is None
    num_grouped = 0 if groups == 1 else MAX_POSITIONS - 1
    assert len(delegated) == 20 - num_grouped


def test_mixing_up_heads_would_be_noticed():
    query, key, value, mask = states(groups=2, new=3)
    expected, _ = sdpa_attention_forward(Layer(2), query, key, value, mask)
    found, _ = grouped_attention_forward(Layer(2), query, key.flip(1), value, mask)
    assert (found - expected).abs().max() > 0.01


def test_head_dimension_of_values_may_differ(delegated):
    query, key, value, mask = states(groups=2, new=3)
    found, _ = grouped_attention_forward(Layer(2), query, key, value[..., :5], mask)
    expected, _ = sdpa_attention_forward(Layer(2), query, key, value[..., :5].contiguous(), mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not delegated


def test_mask_of_one_row_serves_all(delegated):
    query, key, value, mask = states(groups=2, new=3)
    found, _ = grouped_attention_forward(Layer(2), query, key, value, mask[:1])
    expected, _ = sdpa_attention_forward(Layer(2), query, key, value, mask[:1])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not delegated


def additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


def test_additive_mask_gives_the_same(delegated):
    query, key, value, mask = states(groups=2, new=5)
    found, _ = grouped_attention_forward(Layer(2), query, key, value, additive(mask))
    expected, _ = sdpa_attention_forward(Layer(2), query, key, value, mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert not delegated


@pytest.mark.parametrize(
    ("change_mask", "new", "extras"),
    [
        (lambda mask: None, 5, {}),
        (lambda mask: mask, 1, {}),
        (lambda mask: mask, MAX_POSITIONS + 1, {}),
        (lambda mask: mask.expand(-1, 4, -1, -1), 5, {}),
        (lambda mask: mask, 5, {"position_bias": torch.full((1, 4, 5, 37), 0.3)}),
    ],
    ids=["no mask", "one position", "many positions", "mask per head", "position bias"],
)
def test_other_calls_go_to_transformers(change_mask, new, extras, delegated):
    query, key, value, mask = states(groups=2, new=new)
    mask = change_mask(mask)
    found, _ = grouped_attention_forward(Layer(2), query, key, value, mask, **extras)
    expected, _ = sdpa_attention_forward(Layer(2), query, key, value, mask, **extras)
    assert torch.equal(found, expected)
    assert len(delegated) == 1


@pytest.mark.parametrize("extras", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}])
def test_softcap_and_sinks_are_left_to_transformers(extras, monkeypatch):
    query, key, value, mask = states(groups=2, new=5)
    handed = {}
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *args, **kwargs: handed.update(kwargs) or "theirs")
    assert grouped_attention_forward(Layer(2), query, key, value, mask, **extras) == "theirs"
    assert handed.keys() >= extras.keys()


@pytest.fixture
def model():
    return make_model("llama")


def implementation(model) -> str:
    return model.config._attn_implementation


def test_registered_with_its_mask():
    assert GROUPED_ATTENTION in AttentionInterface()
    assert GROUPED_ATTENTION in AttentionMaskInterface()


def test_switched_on_inside_and_off_afterwards(model):
    assert implementation(model) == "sdpa"
    with grouped_attention(model):
        assert implementation(model) == GROUPED_ATTENTION
        with grouped_attention(model):
            assert implementation(model) == GROUPED_ATTENTION
        assert implementation(model) == GROUPED_ATTENTION
    assert implementation(model) == "sdpa"
    assert not attention._users


def test_switched_off_after_an_exception(model):
    with pytest.raises(KeyError), grouped_attention(model):
        raise KeyError
    assert implementation(model) == "sdpa"


def test_last_of_two_threads_switches_off(model):
    is_inside, may_leave, seen = threading.Event(), threading.Event(), []

    def hold():
        with grouped_attention(model):
            is_inside.set()
            may_leave.wait(10)
            seen.append(implementation(model))

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_inside.wait(10)
    with grouped_attention(model):
        pass
    assert implementation(model) == GROUPED_ATTENTION
    may_leave.set()
    thread.join(10)
    assert seen == [GROUPED_ATTENTION]
    assert implementation(model) == "sdpa"


def test_two_models_do_not_share_the_switch(model):
    other = copy.deepcopy(model)
    with grouped_attention(model):
        assert implementation(other) == "sdpa"


def test_eager_model_is_left_alone():
    model = make_model("llama", attn_implementation="eager")
    with grouped_attention(model):
        assert implementation(model) == "eager"
    assert implementation(model) == "eager"


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt2"])
@torch.no_grad()
def test_logits_are_the_same_inside_and_outside(family):
    model = make_model(family)
    batch = left_padded([9, 3, 14])
    outside = model(**batch).logits
    with grouped_attention(model):
        inside = model(**batch).logits
    is_token = batch["attention_mask"].bool()
    torch.testing.assert_close(inside[is_token], outside[is_token], rtol=0, atol=1e-4 * float(outside.abs().max()))


def test_decoding_uses_it_for_verification_and_restores_sdpa(model, monkeypatch):
    shapes = []
    product = nn.functional.scaled_dot_product_attention

    def counted(query, key, value, *args, **kwargs):
        shapes.append((query.shape[1:3], key.shape[1]))
        return product(query, key, value, *args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", counted)
    decoder = Decoder(model, CausalLMDrafter(make_model("llama", seed=1), num_assistant_tokens=3), max_batch_size=2)
    run = decoder.run([Request([5, 6, 7], 12), Request([8], 12)])
    next(run)
    assert implementation(model) == GROUPED_ATTENTION
    shapes.clear()
    next(run)
    assert shapes.count(((2, 8), 2)) == 2, "both layers fold 4 heads at 4 positions into 2 heads at 8"
    run.close()
    assert implementation(model) == "sdpa"
