"""A drafter as a module."""

import copy
import pickle

import pytest
import torch

from hf_specgen import DSparkModel
from hf_specgen.dspark import Calibration
from hf_specgen.dspark.backbone import DSparkRotaryEmbedding
from tests.support.dspark_files import assert_equal_tensors
from tests.support.dspark_models import (
    MASK,
    SMALL,
    drafter_for,
    states_of,
    target_of,
)
from tests.support.models import make_model

IDS = torch.tensor([[5, 6, 7, 9]])


@pytest.fixture(scope="module")
def target():
    return make_model("qwen3", num_hidden_layers=4)


@pytest.fixture
def model(target):
    return drafter_for(target)


# As a module


def test_deepcopy_and_pickle(model):
    model.confidence_threshold = 0.4
    model.calibration = Calibration((1.0, 1.5, 2.0, 0.5))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal_tensors(again, model)
        assert again.confidence_threshold == 0.4 and again.calibration == model.calibration
        assert torch.equal(states_of(again), states_of(model))
        assert again.fc.weight.data_ptr() != model.fc.weight.data_ptr()


def test_meta_device(model):
    with torch.device("meta"):
        empty = DSparkModel(model.config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    empty.rotary_emb = DSparkRotaryEmbedding(model.config)  # its frequencies are in no checkpoint
    assert torch.equal(states_of(empty), states_of(model))


def test_frequencies_are_right_after_loading(model, tmp_path):
    """They are not stored, and loading makes the model on the meta device."""
    model.save_pretrained(tmp_path)
    again = DSparkModel.from_pretrained(tmp_path)
    assert torch.equal(again.rotary_emb.inv_freq, DSparkRotaryEmbedding(model.config).inv_freq)


def test_train_and_eval(target, tmp_path):
    model = drafter_for(target, attention_dropout=0.5)
    assert DSparkModel.from_target(target, MASK, **SMALL).training
    model.save_pretrained(tmp_path)
    assert not DSparkModel.from_pretrained(tmp_path).training
    assert torch.equal(states_of(model), states_of(model))
    model.train()
    assert not torch.equal(states_of(model), states_of(model)), "dropout is for training only"


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "gemma4", "gemma4-k-eq-v"])
def test_gradients_reach_every_parameter(family, head):
    model = drafter_for(target_of(family), markov_head_type=head).train()
    frozen = (model.embed_tokens, model.lm_head)
    for table in frozen:
        table.requires_grad_(False)
    width = len(model.config.target_layer_ids) * 32
    block = torch.tensor([[5, MASK, MASK, MASK], [6, MASK, MASK, MASK]])
    positions = torch.arange(6, 10).expand(2, -1)
    states = model(block, positions, torch.randn(2, 6, width), torch.arange(6).expand(2, -1)).last_hidden_state
    logits = []
    confidences = model.unroll(
        states, model.base_logits(states), block[:, 0], lambda _, found: logits.append(found) or found.argmax(dim=-1)
    )
    loss = torch.stack(logits).square().mean() + torch.stack(logits).logsumexp(dim=-1).mean()
    (loss + confidences.square().mean()).backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    biases = {f"layers.{i}.self_attn.k_proj.bias" for i in range(2)}  # moves all scores of a query alike, but for rope
    assert not set(without) - biases
    assert all(p.grad is None for table in frozen for p in table.parameters())
