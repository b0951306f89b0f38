"""Models, drafts and prompts for the scripts, by name."""

import copy

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_specgen import DSparkModel
from hf_specgen.dspark.layouts import is_drafter
from hf_specgen.embedded.model import load_embedded_model

EMBEDDED, SMALL, BYTES = "smollm2", "small", "bytes"


def load_model(name: str, tokenizer_name: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Loads a target and its tokenizer.

    Args:
        name (`str`): `"smollm2"` (embedded, see [`load_embedded_model`]), `"small"` (4M random parameters over bytes),
            or whatever `from_pretrained` takes.
        tokenizer_name (`str`, *optional*): where its tokenizer is, if not there; `"bytes"` for models whose ids are
            bytes.
    """
    if name == EMBEDDED:
        return load_embedded_model()
    if name == SMALL:
        return small_model(), byte_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
    if tokenizer_name == BYTES:
        return model, byte_tokenizer(is_padding_first=False)
    return model, AutoTokenizer.from_pretrained(name if tokenizer_name is None else tokenizer_name)


def load_draft_model(name: str, target: PreTrainedModel) -> PreTrainedModel:
    """A drafter for `target`: a DSpark or DFlash checkpoint in any layout, or a smaller causal language model."""
    model_class = DSparkModel if is_drafter(PreTrainedConfig.get_config_dict(name)[0]) else AutoModelForCausalLM
    return model_class.from_pretrained(name, dtype=target.dtype).eval().to(target.device)


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


def byte_tokenizer(is_padding_first: bool = True) -> PreTrainedTokenizerFast:
    """One token per byte. Padding is id 0 and a byte's id one more than the byte; or ids are bytes, 258 is padding."""
    vocabulary = {character: byte + is_padding_first for byte, character in bytes_to_unicode().items()}
    vocabulary |= {"<pad>": 0} if is_padding_first else {"<s>": 256, "</s>": 257, "<pad>": 258}
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
