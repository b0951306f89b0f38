"""Models inside wrappers: PEFT, compiled and data-parallel modules."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_specgen import (
    disable_speculation,
    enable_speculation,
)
from tests.support.models import (
    assert_partly_accepted,
    assert_same_as_plain,
    left_padded,
    make_model,
    noisy_copy,
)


@pytest.fixture(scope="module")
def draft(llama):
    return noisy_copy(llama)


@pytest.fixture
def speculating(llama):
    return enable_speculation(copy.deepcopy(llama))


def test_lora_model_generates_as_without_speculation(llama, draft):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    lora = peft.get_peft_model(copy.deepcopy(llama), settings).eval()
    batch = left_padded([6, 2, 4])
    expected = lora.generate(**batch, max_new_tokens=24)
    assert expected.tolist() != llama.generate(**batch, max_new_tokens=24).tolist()
    assert enable_speculation(lora) is lora
    target = lora.get_base_model()
    for drafting in ({"assistant_model": noisy_copy(target)}, {"assistant_model": draft}):
        assert lora.generate(**batch, max_new_tokens=24, **drafting).tolist() == expected.tolist()
        assert_partly_accepted(target.speculation_stats)
    assert type(disable_speculation(lora).get_base_model()) is LlamaForCausalLM


def test_peft_model_as_draft(llama):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=1, target_modules=["v_proj"], init_lora_weights=False)
    lora = peft.get_peft_model(copy.deepcopy(llama), settings).eval()
    stats = [
        assert_same_as_plain(llama, left_padded([6, 2], seed=seed), {"assistant_model": lora}, max_new_tokens=24)
        for seed in range(4)
    ]
    assert_partly_accepted(*stats)


def test_peft_model_that_learns_a_prompt_is_refused(llama):
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="learn a prompt"):
        enable_speculation(peft.get_peft_model(copy.deepcopy(llama), settings))


@pytest.mark.slow
def test_compiled_forward():
    plain = make_model(num_hidden_layers=1)
    model, draft = enable_speculation(copy.deepcopy(plain)), noisy_copy(plain)
    model.forward = torch.compile(model.forward, backend="eager")
    batch = left_padded([6, 2])
    actual = model.generate(**batch, assistant_model=draft, max_new_tokens=6, num_assistant_tokens=2)
    assert actual.tolist() == plain.generate(**batch, max_new_tokens=6).tolist()
    assert_partly_accepted(model.speculation_stats)


def test_compiled_module_is_looked_through(llama, draft):
    model = copy.deepcopy(llama)
    compiled = torch.compile(model, backend="eager")
    assert enable_speculation(compiled) is compiled
    batch = left_padded([6, 2])
    actual = compiled.generate(**batch, assistant_model=draft, max_new_tokens=24)
    assert actual.tolist() == llama.generate(**batch, max_new_tokens=24).tolist()
    assert_partly_accepted(model.speculation_stats)
