"""Who serves a call: the loop, transformers or nobody."""

import copy

import pytest
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from hf_specgen import (
    enable_speculation,
)
from tests.support.models import (
    EOS,
    PAD,
    left_padded,
    make_model,
    noisy_copy,
)


def test_model_with_windows_of_its_own_is_served_one_row_at_a_time():
    config = GPTNeoConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        window_size=8,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=256,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    torch.manual_seed(0)
    plain = GPTNeoForCausalLM(config).eval()
    ours, draft = enable_speculation(copy.deepcopy(plain)), noisy_copy(plain)
    draft.generation_config.num_assistant_tokens = 5
    one, two = left_padded([12]), left_padded([9, 12])
    assert torch.equal(
        ours.generate(**one, max_new_tokens=14, assistant_model=draft), plain.generate(**one, max_new_tokens=14)
    )
    with pytest.raises(ValueError, match="attention windows"):
        ours.generate(**two, max_new_tokens=14, assistant_model=draft)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_zeros_inside_a_row_are_left_to_transformers_under_sliding_windows(family):
    plain = make_model(family)
    ours, draft = enable_speculation(copy.deepcopy(plain)), noisy_copy(plain)
    batch = left_padded([12])
    batch["attention_mask"][0, 7:10] = 0
    expected = plain.generate(**batch, max_new_tokens=16)
    assert torch.equal(ours.generate(**batch, max_new_tokens=16, assistant_model=draft), expected)
    batch = {name: tensor.repeat(2, 1) for name, tensor in batch.items()}
    with pytest.raises(ValueError, match="zeros inside a row"):
        ours.generate(**batch, max_new_tokens=16, assistant_model=draft)


def test_zeros_inside_a_row_are_served_without_windows(llama):
    ours, draft = enable_speculation(copy.deepcopy(llama)), noisy_copy(llama)
    batch = left_padded([12, 9])
    batch["attention_mask"][0, 7:10] = 0
    expected = llama.generate(**batch, max_new_tokens=16)
    assert torch.equal(ours.generate(**batch, max_new_tokens=16, assistant_model=draft), expected)
