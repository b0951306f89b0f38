"""Models, drafts and batches for the commands, by name."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import is_offline_mode
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
from hf_specgen.dspark import is_drafter
from hf_specgen.embedded import load_embedded_model

from .options.checks import BYTES, EMBEDDED, SMALL


def load_model(name: str, tokenizer_name: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Loads a target and its tokenizer.

    Args:
        name (`str`): `"smollm2"` (embedded, see [`load_embedded_model`]), `"small"` (4M random parameters over bytes),
            or whatever `from_pretrained` takes.
        tokenizer_name (`str`, *optional*): where its tokenizer is, if not there; `"bytes"` for models whose ids are
            bytes.

    Raises:
        `ValueError`: if there is no such model, naming it, and saying so where the hub was not asked.
    """
    if name == EMBEDDED:
        return load_embedded_model()
    if name == SMALL:
        return small_model(), byte_tokenizer()
    if tokenizer_name == BYTES:
        tokenizer = byte_tokenizer(is_padding_first=False)
    else:  # before the model, which takes longer
        source = name if tokenizer_name is None else tokenizer_name
        with loading("model" if tokenizer_name is None else "tokenizer", source):
            tokenizer = AutoTokenizer.from_pretrained(source)
    with loading("model", name):
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
    return model, tokenizer


@contextmanager
def loading(role: str, name: str) -> Iterator[None]:
    """Says which model could not be loaded."""
    try:
        yield
    except (OSError, ValueError) as error:
        if Path(name).exists():
            raise ValueError(f"The {role} in {name!r} cannot be loaded: {error}") from error
        if is_offline_mode():
            raise ValueError(
                f"The {role} {name!r} is no folder here and not in the hub's cache on this machine, and the hub is "
                "not asked, because `HF_HUB_OFFLINE` is set."
            ) from error
        raise ValueError(f"The {role} {name!r} is no folder here, and the hub does not give it: {error}") from error


def load_draft_model(name: str, target: PreTrainedModel) -> PreTrainedModel:
    """A drafter for `target`: a DSpark or DFlash checkpoint in any layout, or a smaller causal language model."""
    with loading("draft model", name):
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
