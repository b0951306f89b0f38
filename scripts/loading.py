"""Models, drafts and prompts for the scripts, by name."""

import copy

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from hf_specgen.embedded_model import load_embedded_model

EMBEDDED, SMALL = "smollm2", "small"


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Loads a target and its tokenizer.

    Args:
        name (`str`): `"smollm2"` (embedded, see [`load_embedded_model`]), `"small"` (4M random parameters over bytes),
            or whatever `from_pretrained` takes.
    """
    if name == EMBEDDED:
        return load_embedded_model()
    if name == SMALL:
        return small_model(), byte_tokenizer()
    return AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval(), AutoTokenizer.from_pretrained(name)


def small_model(seed: int = 0) -> PreTrainedModel:
    """A random Llama of 4M parameters, for measuring loops rather than text."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte; id 0 is padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0} | {character: index for index, character in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def noisy_draft(model: PreTrainedModel, noise: float, seed: int = 1) -> PreTrainedModel:
    """A copy of the target whose head is disturbed by `noise` times its spread: a draft that is right sometimes."""
    draft = copy.deepcopy(model)
    head = draft.get_output_embeddings()
    generator = torch.Generator().manual_seed(seed)
    disturbance = torch.randn(head.weight.shape, generator=generator) * head.weight.std() * noise
    head.weight = torch.nn.Parameter((head.weight + disturbance).detach())
    return draft


def left_padded(prompts: list[list[int]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """A batch for `generate`."""
    longest = max(map(len, prompts))
    input_ids = [[pad_token_id] * (longest - len(ids)) + ids for ids in prompts]
    attention_mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    return {"input_ids": torch.tensor(input_ids), "attention_mask": torch.tensor(attention_mask)}
