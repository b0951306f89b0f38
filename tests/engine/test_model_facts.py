"""What a model's configuration and modules say: ids, positions, device."""

import copy

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    MoshiConfig,
    MoshiForCausalLM,
)

from hf_specgen import Decoder, Request, enable_speculation
from hf_specgen.engine.model_facts import (
    check_positions,
    context_length,
    eos_ids,
    execution_device,
    learned_positions,
    num_input_ids,
    vocab_size,
)
from tests.support.models import (
    FAMILIES,
    assert_partly_accepted,
    assert_same_as_plain,
    left_padded,
    make_model,
    noisy_copy,
)


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


def test_table_of_sinusoids_is_a_limit_too():
    config = GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=16)
    assert learned_positions(GPTJForCausalLM(config)) == 16


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox"])
def test_context_length_comes_from_the_configuration(family):
    assert context_length(make_model(family)) == 256


def test_context_length_that_no_configuration_says():
    assert context_length(BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4))) is None


def test_embeddings_may_know_more_ids_than_the_head_scores():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 32}
    model = MoshiForCausalLM(MoshiConfig(vocab_size=64, **sizes))
    assert (num_input_ids(model), vocab_size(model)) == (65, 64)


@pytest.mark.parametrize(
    ("given", "ids"), [(None, set()), (-1, set()), (2, {2}), ([2, 5], {2, 5}), ([2, -1], {2}), ([-1], set())], ids=str
)
def test_end_ids_without_the_one_that_means_none(given, ids):
    assert eos_ids(given) == ids


@pytest.mark.parametrize("drafting", ["lookup", "draft"])
def test_offloaded_model_runs_on_its_execution_device(llama, drafting):
    accelerate = pytest.importorskip("accelerate")
    offloaded = accelerate.cpu_offload(copy.deepcopy(llama), torch.device("cpu"))
    assert offloaded.device.type == "meta" and execution_device(offloaded).type == "cpu"
    assert execution_device(llama).type == "cpu"
    draft = accelerate.cpu_offload(noisy_copy(llama), torch.device("cpu"))
    asked = {"assistant_model": draft} if drafting == "draft" else {"prompt_lookup_num_tokens": 3}
    batch = left_padded([6, 2])
    actual = enable_speculation(offloaded).generate(**batch, max_new_tokens=24, **asked)
    assert actual.tolist() == llama.generate(**batch, max_new_tokens=24).tolist()
    assert_partly_accepted(offloaded.speculation_stats)
