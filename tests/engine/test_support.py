"""What the loop cannot serve: the reasons, what transformers' own loop gets instead, and the self-check."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_specgen import Decoder, DecodingStats, Request, enable_speculation
from hf_specgen.engine.support import check_positions, learned_positions, self_check, unsupported_reason
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
)

IDS = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LINEAR = {f"linear_{what}": 2 for what in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}


def t5():
    config = T5Config(**IDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=PAD)
    return widened(T5ForConditionalGeneration, config, gain=1.5)


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


def widened(model_class, config, gain=6.0):
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(gain)
    return model


class ForwardCount:
    def __init__(self, *models):
        self.count = 0
        for model in models:
            model.register_forward_pre_hook(self.add)

    def add(self, *args):
        self.count += 1


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
def test_recurrent_draft_is_refused_before_any_pass(llama, make):
    target, draft = enable_speculation(copy.deepcopy(llama)), make()
    passes = ForwardCount(target, draft)
    for lengths in ([5], [5, 3]):
        with pytest.raises(ValueError, match=f"as a draft, `{type(draft).__name__}` has recurrent"):
            target.generate(**left_padded(lengths), assistant_model=draft, max_new_tokens=4)
    assert passes.count == 0


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
    with pytest.raises(ValueError, match=f"{reason}.*own loop could"):
        target.generate(**left_padded([5, 3]), **settings)
    for asked in ({"on_round": print}, {"trace": True}, {"max_time": 1e9, "stopping_criteria": [lambda *args: False]}):
        with pytest.raises(ValueError, match=f"{reason}.*own loop could"):
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
    with pytest.raises(ValueError, match="`output_attentions`.*own loop could"):
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


# Position encodings


@pytest.mark.parametrize("family", FAMILIES)
def test_learned_positions(family):
    assert learned_positions(make_model(family)) == (256 if family in ("gpt2", "opt") else None)


def requests(*ranges):
    return [Request([3] * start, end - start) for start, end in ranges]


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_last_learned_position_is_reached(family):
    model = make_model(family, max_position_embeddings=24)
    check_positions(model, requests((4, 24), (20, 24)))
    with pytest.raises(ValueError, match="25 tokens, but the target has learned positions for 24"):
        check_positions(model, requests((4, 20), (20, 25)))
    drafting, batch = {"assistant_model": noisy_copy(model)}, left_padded([4, 2])
    assert_partly_accepted(assert_same_as_plain(model, batch, drafting, max_new_tokens=20))


def test_longrope_rows_stay_on_one_side_of_the_switch():
    model = make_model("phi3_longrope")
    for allowed in [(4, 128)], [(129, 200)], [(129, 140), (150, 300)], [(100, 110), (4, 128)]:
        check_positions(model, requests(*allowed))
    for refused in [(4, 129)], [(128, 140)], [(129, 140), (4, 20)]:
        with pytest.raises(ValueError, match="longrope.*128 tokens.*one side"):
            check_positions(model, requests(*refused))


@pytest.mark.parametrize("lengths", [[90, 70], [140, 131]], ids=["short", "long"])
def test_longrope_equals_plain_generate_on_either_side(lengths):
    model = make_model("phi3_longrope")
    drafting = {"assistant_model": noisy_copy(model)}
    stats = [
        assert_same_as_plain(model, left_padded(lengths, seed=seed), drafting, max_new_tokens=24) for seed in range(2)
    ]
    assert_partly_accepted(*stats)


def test_dynamic_rope_is_served_below_the_switch_only():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = make_model("llama", rope_parameters=rope, max_position_embeddings=64)
    check_positions(model, requests((4, 64)))
    for beyond in [(4, 65)], [(70, 80)]:
        with pytest.raises(ValueError, match="dynamic.*64 tokens"):
            check_positions(model, requests(*beyond))


def test_request_may_not_join_rows_on_the_other_side_of_the_switch():
    decoder = Decoder(make_model("phi3_longrope"), max_batch_size=2)
    first = Request([3] * 130, 4)
    run = decoder.run([first])
    next(run)
    with pytest.raises(ValueError, match="one side"):
        decoder.add(Request([3] * 10, 4))
    list(run)
    assert first.finish_reason == "length"
    decoder.add(Request([3] * 10, 4))


# The self-check


class BatchSensitive(LlamaForCausalLM):
    """Its logits depend on what else is in the batch."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits + 0.5 * (len(outputs.logits) - 1)
        return outputs


class IgnoresPositions(LlamaForCausalLM):
    """Numbers the tokens of a pass itself."""

    def forward(self, input_ids, position_ids=None, **kwargs):
        return super().forward(input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **kwargs)


class IgnoresMask(LlamaForCausalLM):
    """Builds its own mask over all columns."""

    def forward(self, input_ids, attention_mask=None, **kwargs):
        if attention_mask is not None:
            attention_mask = torch.ones_like(attention_mask)
        return super().forward(input_ids, attention_mask=attention_mask, **kwargs)


@pytest.mark.parametrize("model_class", [BatchSensitive, IgnoresPositions, IgnoresMask])
def test_self_check_refuses_a_model_that_treats_ragged_rows_otherwise(llama, model_class):
    model = model_class(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    for _ in range(2):  # a refused model is checked again
        with pytest.raises(ValueError, match=f"`{model_class.__name__}` does not decode ragged rows.*differ by"):
            Decoder(model)
    with pytest.raises(ValueError, match="does not decode ragged rows"):
        enable_speculation(model).generate(**left_padded([5, 3]), assistant_model=llama, max_new_tokens=4)


def test_self_check_runs_once_per_model(llama):
    model = copy.deepcopy(llama)
    passes = ForwardCount(model)
    Decoder(model)
    assert passes.count == 4
    Decoder(model)
    assert passes.count == 4
    other = copy.deepcopy(llama)
    passes = ForwardCount(other)
    Decoder(other)
    assert passes.count == 4, "a copy is another model"


def test_self_check_leaves_flags_and_ignores_dropout():
    model = make_model(attention_dropout=0.9).train()
    model.model.layers[1].eval()
    flags = [module.training for module in model.modules()]
    self_check(model)
    assert [module.training for module in model.modules()] == flags


def test_self_check_passes_a_model_whose_head_is_zero(llama):
    model = copy.deepcopy(llama)
    nn.init.zeros_(model.lm_head.weight)
    self_check(model)
    nn.init.constant_(model.lm_head.weight, float("nan"))
    with pytest.raises(ValueError, match="nan"):
        self_check(copy.deepcopy(model))


def test_eager_and_sdpa_models_run_on_their_own_attention(llama):
    stats = DecodingStats()
    for attention in ("eager", "sdpa"):
        model = make_model(attn_implementation=attention)
        stats += assert_same_as_plain(
            model, left_padded([5, 3]), {"assistant_model": noisy_copy(llama)}, max_new_tokens=24
        )
    assert_partly_accepted(stats)


def test_table_of_sinusoids_is_a_limit_too():
    config = GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=16)
    assert learned_positions(GPTJForCausalLM(config)) == 16
