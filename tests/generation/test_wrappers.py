"""Models inside wrappers: PEFT, compiled and data-parallel modules."""

import copy

import pytest
import torch
from torch import distributed, nn
from transformers import LlamaForCausalLM

from hf_specgen import (
    disable_speculation,
    enable_speculation,
)
from hf_specgen.generation import unwrap
from hf_specgen.generation.wrappers import adapter_names_of_rows
from tests.support.generate_calls import ForwardCount
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


@pytest.mark.slow
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


# Adapters per row


@pytest.fixture
def two_adapters(llama):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    lora = peft.get_peft_model(copy.deepcopy(llama), settings, adapter_name="a").eval()
    lora.add_adapter("b", settings)
    return enable_speculation(lora)


def test_adapters_of_rows_are_refused_in_a_batch_and_leave_no_hooks(two_adapters):
    batch, names = left_padded([6, 2]), ["a", "b"]
    plain = disable_speculation(copy.deepcopy(two_adapters))
    passes = ForwardCount(two_adapters.get_base_model())
    for drafting in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": noisy_copy(make_model())}):
        with pytest.raises(ValueError, match=r"`adapter_names` gives rows.*\['a', 'b'\].*batch has 2"):
            two_adapters.generate(**batch, adapter_names=names, max_new_tokens=8, **drafting)
    assert passes.count == 0 and adapter_names_of_rows(two_adapters) == []
    actual = two_adapters.generate(**batch, prompt_lookup_num_tokens=3, max_new_tokens=8)
    assert actual.tolist() == plain.generate(**batch, max_new_tokens=8).tolist()
    actual = two_adapters.generate(**batch, adapter_names=names, max_new_tokens=8)
    assert actual.tolist() == plain.generate(**batch, adapter_names=names, max_new_tokens=8).tolist()


@pytest.mark.parametrize("name", ["a", "b"])
def test_adapter_of_one_row_is_followed(two_adapters, name):
    plain = disable_speculation(copy.deepcopy(two_adapters))
    settings = {"adapter_names": [name], "max_new_tokens": 16}
    expected = plain.generate(**left_padded([6]), **settings)
    actual = two_adapters.generate(**left_padded([6]), **settings, prompt_lookup_num_tokens=3)
    assert actual.tolist() == expected.tolist()
    assert adapter_names_of_rows(two_adapters) == []


# Data parallelism


@pytest.fixture
def one_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, nn.parallel.DistributedDataParallel, None], ids=["dp", "ddp", "both"]
)
def test_data_parallel_modules_are_looked_through(llama, one_process, wrap):
    model = copy.deepcopy(llama)
    if wrap is None:
        wrapped = nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))
    else:
        wrapped = wrap(model)
    assert unwrap(wrapped) is model
    assert enable_speculation(wrapped) is wrapped
    batch = left_padded([6, 2])
    actual = model.generate(**batch, assistant_model=noisy_copy(llama), max_new_tokens=16)
    assert actual.tolist() == llama.generate(**batch, max_new_tokens=16).tolist()
    assert type(disable_speculation(wrapped)) is type(wrapped) and type(model) is type(llama)
