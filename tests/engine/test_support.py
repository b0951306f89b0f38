"""What the loop cannot serve: the reasons, what transformers' own loop gets instead, and the self-check."""

import copy

import pytest
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from hf_specgen import Decoder, DecodingStats, enable_speculation
from hf_specgen.engine.support import unsupported_reason
from tests.support.generate_calls import ForwardCount
from tests.support.models import (
    EOS,
    FAMILIES,
    PAD,
    VOCAB_SIZE,
    assert_partly_accepted,
    assert_same_as_plain,
    left_padded,
    make_model,
    noisy_copy,
    t5,
    widened,
)

IDS = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LINEAR = {f"linear_{what}": 2 for what in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}


def bloom():
    return widened(BloomForCausalLM, BloomConfig(**IDS, hidden_size=32, n_layer=2, n_head=4))


def llama4():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "intermediate_size_mlp": 64, "num_hidden_layers": 4}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return widened(Llama4ForCausalLM, Llama4TextConfig(**IDS, **HEADS, **sizes, **experts, attention_chunk_size=8))


def mamba():
    return widened(MambaForCausalLM, MambaConfig(**IDS, hidden_size=32, num_hidden_layers=2, state_size=4))


def qwen3_next():
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "shared_expert_intermediate_size": 16}
    return widened(Qwen3NextForCausalLM, Qwen3NextConfig(**IDS, **HEADS, **sizes, **LINEAR, **EXPERTS))


# Refused or handed over


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_no_reason_against_them(family):
    assert unsupported_reason(make_model(family)) is None


@pytest.mark.parametrize("make", [mamba, qwen3_next])
@pytest.mark.parametrize("drafting", ["draft", "lookup"])
@pytest.mark.parametrize("lengths", [[5], [5, 3]], ids=["single", "batch"])
def test_recurrent_target_is_refused_before_any_pass(llama, make, drafting, lengths):
    draft = copy.deepcopy(llama)
    target = enable_speculation(make())
    asked = {"assistant_model": draft} if drafting == "draft" else {"prompt_lookup_num_tokens": 3}
    passes = ForwardCount(target, draft)
    with pytest.raises(ValueError, match=f"`{type(target).__name__}` has recurrent or linear-attention layers"):
        target.generate(**left_padded(lengths), **asked, max_new_tokens=4)
    with pytest.raises(ValueError, match="recurrent or linear-attention"):
        Decoder(target)
    assert passes.count == 0
    assert target.generate(**left_padded(lengths), max_new_tokens=4).shape[0] == len(lengths)


@pytest.mark.parametrize("make", [mamba, qwen3_next])
def test_recurrent_draft_serves_one_row_where_transformers_can_use_it(llama, make):
    target, draft = enable_speculation(copy.deepcopy(llama)), make()
    passes, one = ForwardCount(target, draft), left_padded([5])
    with pytest.raises(ValueError, match=f"as a draft, `{type(draft).__name__}` has recurrent.*one row"):
        target.generate(**left_padded([5, 3]), assistant_model=draft, max_new_tokens=4)
    assert passes.count == 0
    if make is mamba:
        with pytest.raises(ValueError, match="as a draft, `MambaForCausalLM` has recurrent.*own loop fails with"):
            target.generate(**one, assistant_model=draft, max_new_tokens=24)
    else:
        actual = target.generate(**one, assistant_model=draft, max_new_tokens=24)
        assert actual.tolist() == llama.generate(**one, max_new_tokens=24).tolist()


@pytest.mark.parametrize(
    ("make", "reason"),
    [(t5, "is an encoder-decoder model"), (bloom, "alibi"), (llama4, r"kind \['chunked_attention'\]")],
)
def test_one_row_is_handed_to_transformers_and_a_batch_is_refused(make, reason):
    plain = make()
    target, draft = enable_speculation(copy.deepcopy(plain)), copy.deepcopy(plain)
    settings = {"assistant_model": draft, "max_new_tokens": 24}
    actual = target.generate(**left_padded([5]), **settings)
    assert actual.tolist() == plain.generate(**left_padded([5]), max_new_tokens=24).tolist()
    assert len(set(actual[0].tolist())) > 2, "this text is too simple to show anything"
    assert target.speculation_stats is None
    with pytest.raises(ValueError, match=f"{reason}.*own loop"):
        target.generate(**left_padded([5, 3]), **settings)
    for asked in ({"on_round": print}, {"trace": True}, {"max_time": 1e9, "stopping_criteria": [lambda *args: False]}):
        with pytest.raises(ValueError, match=f"{reason}.*own loop"):
            target.generate(**left_padded([5]), **settings, **asked)


def test_alibi_draft_is_handed_over_too(llama):
    target = enable_speculation(copy.deepcopy(llama))
    settings = {"assistant_model": bloom(), "max_new_tokens": 12}
    expected = llama.generate(**left_padded([5]), max_new_tokens=12)
    assert target.generate(**left_padded([5]), **settings).tolist() == expected.tolist()
    assert target.speculation_stats is None
    with pytest.raises(ValueError, match="as a draft, `BloomForCausalLM` builds alibi"):
        target.generate(**left_padded([5, 3]), **settings)


def test_attentions_come_from_transformers_for_one_row():
    plain = make_model(attn_implementation="eager")
    target, draft = enable_speculation(copy.deepcopy(plain)), noisy_copy(plain)
    settings = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 8}
    actual = target.generate(**left_padded([5]), assistant_model=draft, **settings)
    expected = plain.generate(**left_padded([5]), **settings)
    assert actual.sequences.tolist() == expected.sequences.tolist()
    assert len(actual.attentions) == len(expected.attentions) == 8
    assert target.speculation_stats is None
    with pytest.raises(ValueError, match="`output_attentions`.*own loop"):
        target.generate(**left_padded([5, 3]), assistant_model=draft, **settings)


def test_flash_attention_names_the_way_out(llama, monkeypatch):
    target = enable_speculation(copy.deepcopy(llama))
    monkeypatch.setattr(target.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ValueError, match=r"'flash_attention_2'.*set_attn_implementation\('sdpa'\)"):
        target.generate(**left_padded([5, 3]), assistant_model=noisy_copy(llama), max_new_tokens=4)
    with pytest.raises(ValueError, match="'flash_attention_2'"):
        Decoder(target)
    target.set_attn_implementation("sdpa")
    stats = assert_same_as_plain(llama, left_padded([5, 3]), {"assistant_model": noisy_copy(llama)}, max_new_tokens=24)
    assert_partly_accepted(stats)


def test_eager_and_sdpa_models_run_on_their_own_attention(llama):
    stats = DecodingStats()
    for attention in ("eager", "sdpa"):
        model = make_model(attn_implementation=attention)
        stats += assert_same_as_plain(
            model, left_padded([5, 3]), {"assistant_model": noisy_copy(llama)}, max_new_tokens=24
        )
    assert_partly_accepted(stats)
