"""Tiny models and tokenizers for the tests. CPU, fp32, one thread, no network."""

import copy

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_specgen import DecodingStats, Request, enable_speculation
from hf_specgen.engine.batch import Rows

VOCAB_SIZE, PAD, BOS, EOS = 64, 0, 1, 2
_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 128,
}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "qwen2": ("Qwen2Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt2": ("GPT2Config", _GPT2),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "phi3": ("Phi3Config", {}),
    "phi3_longrope": ("Phi3Config", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 128}),
    "mixtral": ("MixtralConfig", _MOE),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 8, **_MOE}),
}


def make_model(family: str = "llama", seed: int = 0, gain: float = 6.0, **overrides) -> PreTrainedModel:
    """A tiny random model; `gain` widens its weights so that greedy text does not settle on one token."""
    config_name, settings = FAMILIES[family]
    attention = overrides.pop("attn_implementation", None)
    config = getattr(transformers, config_name)(**{**_BASE, **settings, **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(gain)
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = EOS
    return model


def widened(model_class: type[PreTrainedModel], config: transformers.PreTrainedConfig, gain: float = 6.0):
    """A random model of some class, with wide weights as in `make_model`."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(gain)
    return model


def t5() -> PreTrainedModel:
    ids = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**ids, **sizes, decoder_start_token_id=PAD)
    return widened(transformers.T5ForConditionalGeneration, config, gain=1.5)


def noisy_copy(model: PreTrainedModel, scale: float = 0.25, seed: int = 1) -> PreTrainedModel:
    """A copy whose head is disturbed by `scale` times its own spread: some candidates are kept, some are not."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        weight = draft.get_output_embeddings().weight
        if weight is draft.get_input_embeddings().weight:  # tied: give the head its own weight
            head = draft.get_output_embeddings()
            head.weight = nn.Parameter(weight.detach().clone())
            weight = head.weight
        weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * scale)
    return draft


def left_padded(lengths: list[int], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> dict[str, torch.Tensor]:
    """A left-padded batch of random prompts without special ids."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    input_ids = torch.full((len(lengths), longest), PAD)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        input_ids[row, longest - length :] = torch.randint(3, vocab_size, (length,), generator=generator)
        attention_mask[row, longest - length :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def ragged_lengths(rows: int, seed: int = 0, longest: int = 12) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, longest + 1, (rows,), generator=generator).tolist()


def cycle_model(permutation: list[int], runner_up: float = 0.0) -> PreTrainedModel:
    """A causal LM whose next token is `permutation[current]` with score 10; all others have `runner_up` x 10."""
    size = len(permutation)
    config = transformers.LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=512,
        rms_norm_eps=1e-12,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        head = torch.full((size, size), 10 * runner_up)
        head[permutation, torch.arange(size)] = 10.0
        model.lm_head.weight.copy_(head / size**0.5)  # RMSNorm scales a one-hot state by sqrt(size)
    return model


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One token per character, ids in the order of `characters`."""
    vocabulary = {character: index for index, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=characters[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=characters[0])


def take_slot(rows: Rows, request: Request) -> None:
    """Gives a request the first free slot, without prefilling its prompt."""
    request.start(rows.device)
    rows.requests[rows.requests.index(None)] = request


def assert_partly_accepted(*stats: DecodingStats) -> None:
    """Prints the mean acceptance of runs with a noisy draft; fails when nothing or everything was accepted."""
    total = sum(stats, DecodingStats())
    print(f"\nacceptance {total.acceptance_rate:.2f}, {total.mean_accepted_length:.2f} tokens per drafting round")
    assert total.drafting_rounds > 0, "nothing was drafted"
    assert 0 < total.acceptance_rate < 1, f"an acceptance of {total.acceptance_rate} shows nothing"


def assert_same_as_plain(
    model: PreTrainedModel, batch: dict[str, torch.Tensor], drafting: dict, **settings
) -> DecodingStats:
    """
    Generates with an enabled copy under the `drafting` arguments and compares, token for token, with plain `generate`
    of `model`, which stays untouched.
    """
    expected = model.generate(**batch, **settings)
    speculating = enable_speculation(copy.deepcopy(model))
    actual = speculating.generate(**batch, **drafting, **settings)
    assert actual.tolist() == expected.tolist()
    return speculating.speculation_stats
