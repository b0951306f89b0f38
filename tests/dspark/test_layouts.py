import json

import pytest
from transformers import AutoConfig, Gemma4TextConfig

from hf_specgen import DSparkConfig, DSparkModel
from hf_specgen.dspark.checkpoint import TABLES
from hf_specgen.dspark.layouts import DRAFTER_FIELDS, FAMILY_FIELDS, LAYOUTS, SHARED_FIELDS, read_layout
from tests.support.models import make_model

QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "initializer_range": 0.02,
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "tie_word_embeddings": False,
}
RELEASED = {
    **QWEN3_4B,
    "architectures": ["Qwen3DSparkModel"],
    "num_target_layers": 36,
    "block_size": 7,
    "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "num_anchors": 512,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "dtype": "bfloat16",
}
SPECULATORS = {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "transformer_layer_config": QWEN3_4B,
    "draft_vocab_size": 32000,
    "block_size": 8,
    "aux_hidden_state_layer_ids": [0, 2, 10, 34],
    "mask_token_id": 151669,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "speculators_config": {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8}],
        "verifier": {"name_or_path": "Qwen/Qwen3-4B", "architectures": ["Qwen3ForCausalLM"]},
    },
}
DFLASH = {
    **QWEN3_4B,
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}
GEMMA4 = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "attention_bias": False,
    "attention_k_eq_v": True,
    "block_size": 7,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3840,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 15360,
    "layer_types": ["full_attention"] * 5,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "mask_token_id": 4,
    "max_position_embeddings": 262144,
    "num_attention_heads": 16,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 48,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "target_layer_ids": [5, 17, 29, 41, 46],
    "target_model_type": "gemma4",
    "target_text_model_type": "gemma4_text",
    "vocab_size": 262144,
}
OPTIONAL = ("num_target_layers", "num_anchors", "markov_rank", "markov_head_type", "enable_confidence_head")
MEANING = (*SHARED_FIELDS, *DRAFTER_FIELDS, *FAMILY_FIELDS)


def config_of(contents: dict) -> DSparkConfig:
    return DSparkConfig(**{n: v for n, v in read_layout(contents).items() if n != "model_type"})


def meaning_of(config: DSparkConfig, without: tuple[str, ...] = ()) -> dict:
    fields = config.to_dict()
    return {name: fields.get(name) for name in MEANING if name not in without}


def without(contents: dict, *names: str) -> dict:
    return {name: value for name, value in contents.items() if name not in names}


# The released layout


def test_released_file_is_read_whole():
    config = config_of(RELEASED)
    for name, value in RELEASED.items():
        if name in SHARED_FIELDS or name in DRAFTER_FIELDS:
            assert getattr(config, name) == value, name
    assert config.sample_from_anchor and config.num_candidates == 7
    assert config.qk_norm and not config.attention_bias and not config.attention_output_bias
    assert not config.value_norm and not config.value_from_key and not config.sandwich_norms
    assert config.attention_scale is None and config.embedding_scale == 1.0
    assert config.final_logit_softcapping is None and config.draft_vocab_size is None
    assert str(config.dtype).endswith("bfloat16")


def test_optional_keys_have_their_defaults():
    config = config_of(without(RELEASED, *OPTIONAL, "confidence_head_with_markov"))
    assert config.markov_rank == 0 and config.num_anchors == 512 and config.num_target_layers is None
    assert not config.enable_confidence_head and not config.confidence_head_with_markov
    assert config.sample_from_anchor


def test_head_dim_is_read_and_not_divided():
    assert config_of(RELEASED).head_dim == 128 != RELEASED["hidden_size"] // RELEASED["num_attention_heads"]


def test_dflash_of_deepseek_predicts_from_its_anchor():
    """`dflash_qwen3_4b_block7` bears the architecture of DSpark and no flag; its slot 0 predicts."""
    contents = {**RELEASED, "markov_rank": 0, "enable_confidence_head": False}
    config = config_of(without(contents, "markov_head_type", "confidence_head_with_markov"))
    assert config.sample_from_anchor and config.num_candidates == 7 and config.markov_rank == 0


def test_dflash_of_deepseek_with_nested_keys_predicts_from_its_anchor():
    nested = {name: RELEASED[name] for name in ("block_size", "mask_token_id", "target_layer_ids")}
    config = config_of({**without(RELEASED, *nested), "dflash_config": nested})
    assert config.sample_from_anchor and config.block_size == 7


@pytest.mark.parametrize("place", ["dspark_config", "dflash_config", "text_config", "prefix"])
def test_keys_are_found_nested_and_prefixed(place):
    names = ("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    moved = {name: RELEASED[name] for name in names}
    contents = without(RELEASED, *names)
    contents |= {f"dspark_{n}": v for n, v in moved.items()} if place == "prefix" else {place: moved}
    assert meaning_of(config_of(contents)) == meaning_of(config_of(RELEASED))


def test_whole_text_config_is_found():
    contents = {"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4", "text_config": GEMMA4}
    assert meaning_of(config_of(contents)) == meaning_of(config_of(GEMMA4))


def test_noise_token_is_the_mask():
    contents = without(RELEASED, "mask_token_id")
    assert config_of({**contents, "dspark_noise_token_id": 11}).mask_token_id == 11
    assert config_of({**contents, "dspark_config": {"noise_token_id": 12}}).mask_token_id == 12


def test_order_in_which_keys_win():
    """SGLang: prefixed, `dspark_config`, `text_config`, top level."""
    contents = {**RELEASED, "block_size": 2}
    assert config_of(contents).block_size == 2
    contents["text_config"] = {"block_size": 3}
    assert config_of(contents).block_size == 3
    contents["dflash_config"] = {"block_size": 4}
    assert config_of(contents).block_size == 4
    contents["dspark_config"] = {"block_size": 5}
    assert config_of(contents).block_size == 5
    contents["dspark_block_size"] = 6
    assert config_of(contents).block_size == 6


@pytest.mark.parametrize("is_bonus", [True, False])
def test_older_name_of_the_layout_of_slots(is_bonus):
    """vLLM before `sample_from_anchor`: a bonus anchor is one that predicts nothing."""
    assert config_of({**RELEASED, "dspark_bonus_anchor": False}).sample_from_anchor
    both = {**RELEASED, "dspark_bonus_anchor": is_bonus, "sample_from_anchor": not is_bonus}
    assert config_of(both).sample_from_anchor is not is_bonus


def test_older_name_of_the_layout_of_slots_alone():
    config = config_of({**RELEASED, "dspark_bonus_anchor": True})
    assert not config.sample_from_anchor
    assert not config_of(config.to_layout("released")).sample_from_anchor


@pytest.mark.parametrize(
    "contents",
    [
        {**RELEASED, "logit_scale": 0.5},
        {**RELEASED, "model_type": "mistral", "sliding_window": 2048},
        {**DFLASH, "dflash_config": {**DFLASH["dflash_config"], "use_swa": True, "swa_window_size": 1024}},
        {**DFLASH, "dflash_config": {**DFLASH["dflash_config"], "causal": True}},
    ],
    ids=["logit_scale", "mistral", "use_swa", "causal"],
)
def test_settings_that_change_the_forward_are_refused(contents):
    with pytest.raises(ValueError, match="logit_scale|sliding|swa|causal"):
        config_of(contents)


def test_reading_changes_nothing():
    for contents in (RELEASED, SPECULATORS, DFLASH, GEMMA4):
        before = json.dumps(contents)
        read_layout(contents)
        assert json.dumps(contents) == before


# speculators


def test_speculators_counts_hidden_states():
    config = config_of(SPECULATORS)
    assert config.target_layer_ids == [-1, 1, 9, 33]
    assert config.draft_vocab_size == 32000 and config.vocab_size == 151936
    assert config.block_size == config.num_candidates == 8 and config.markov_rank == 256


@pytest.mark.parametrize(
    ("algorithm", "explicit", "expected"),
    [
        ("dspark", None, True),
        ("dflash", None, False),
        ("dspark", False, False),
        ("dflash", True, True),
    ],
)
def test_speculators_layout_of_slots(algorithm, explicit, expected):
    contents = without(SPECULATORS, "confidence_head_with_markov")
    contents |= {"speculators_model_type": algorithm, "sample_from_anchor": explicit}
    config = config_of(contents)
    assert config.sample_from_anchor is expected
    assert config.num_candidates == (8 if expected else 7)


def test_speculators_dflash_has_no_markov_head():
    names = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    contents = {**without(SPECULATORS, *names), "speculators_model_type": "dflash"}
    assert config_of(contents).markov_rank == 0
    assert config_of({**contents, "speculators_model_type": "dspark"}).markov_rank == 256


def test_speculators_layers_may_hold_only_what_differs():
    layers = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 2, "head_dim": 64}
    config = config_of({**SPECULATORS, "transformer_layer_config": layers})
    defaults = AutoConfig.for_model("qwen3")
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (1024, 2, 64)
    for name in ("vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"):
        assert getattr(config, name) == getattr(defaults, name), name
    assert config.rope_parameters == defaults.rope_parameters
    assert config.layer_types == ["full_attention"] * 2


def test_speculators_over_llama_layers():
    layers = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    layers |= {"vocab_size": 32000, "intermediate_size": 128, "num_key_value_heads": 2}
    config = config_of({**SPECULATORS, "transformer_layer_config": layers, "mask_token_id": 1})
    assert not config.qk_norm and config.head_dim == 16
    assert config.draft_vocab_size is None, "a vocabulary that is not reduced"


# z-lab's DFlash


def test_dflash_of_zlab():
    config = config_of(DFLASH)
    assert not config.sample_from_anchor
    assert config.block_size == 16 and config.num_candidates == 15
    assert config.mask_token_id == 151669 and config.target_layer_ids == [1, 9, 17, 25, 33]
    assert config.markov_rank == 0 and not config.enable_confidence_head


# Families


def test_gemma4_file_of_the_reference():
    config = config_of(GEMMA4)
    assert config.head_dim == 512 and config.num_key_value_heads == 1 and config.value_from_key
    assert config.qk_norm and config.value_norm and config.sandwich_norms
    assert config.attention_scale == 1.0 and config.embedding_scale == 3840**0.5
    assert config.final_logit_softcapping == 30.0 and config.hidden_act == "gelu_pytorch_tanh"
    assert config.rope_parameters == GEMMA4["rope_parameters"]["full_attention"]
    plain = config_of({**GEMMA4, "attention_k_eq_v": False, "final_logit_softcapping": None})
    assert plain.num_key_value_heads == 8 and not plain.value_from_key
    assert plain.final_logit_softcapping is None and plain.head_dim == 512


@pytest.mark.parametrize("key_equals_value", [True, False])
def test_gemma4_file_of_transformers_5_24(key_equals_value):
    """The wide heads of global layers are in `per_layer_config` there, under the numbers of the target's layers."""
    written = Gemma4TextConfig(
        **without(GEMMA4, "architectures", "layer_types", "num_hidden_layers", "attention_k_eq_v"),
        num_hidden_layers=48,
        attention_k_eq_v=key_equals_value,
    ).to_dict()
    assert "global_head_dim" not in written and written["per_layer_config"]["05"]["head_dim"] == 512
    own = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5, "architectures": ["Gemma4DSparkModel"]}
    config = config_of({**written, **own})
    expected = config_of({**GEMMA4, "attention_k_eq_v": key_equals_value})
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert meaning_of(config, names) == meaning_of(expected, names)


def test_gemma4_of_transformers_5_24_is_written_so_that_it_loads_again(tmp_path):
    written = Gemma4TextConfig(
        **without(GEMMA4, "architectures", "layer_types", "num_hidden_layers"), num_hidden_layers=48
    ).to_dict()
    own = {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5, "architectures": ["Gemma4DSparkModel"]}
    config = config_of({**written, **own})
    contents = config.to_layout("released")
    assert meaning_of(config_of(contents)) == meaning_of(config)
    (tmp_path / "config.json").write_text(json.dumps(contents, default=str))
    assert AutoConfig.from_pretrained(tmp_path).model_type == "gemma4_text"


@pytest.mark.parametrize("name", ["enable_moe_block", "hidden_size_per_layer_input"])
def test_gemma4_parts_that_drafters_lack_are_refused(name):
    with pytest.raises(ValueError, match=f"`{name}`.*not supported"):
        read_layout({**GEMMA4, name: 2})


def layers_of(model_type: str, **settings) -> dict:
    names = ("model_type", "layer_types", "attention_bias", "head_dim", "architectures")
    return {**without(RELEASED, *names), "model_type": model_type, **settings}


def test_biases_and_norms_of_families():
    qwen2 = config_of(layers_of("qwen2"))
    assert qwen2.attention_bias and not qwen2.attention_output_bias and not qwen2.qk_norm
    assert qwen2.head_dim == 80
    llama = config_of(layers_of("llama"))
    assert not llama.attention_bias and not llama.qk_norm and not llama.mlp_bias
    biased = config_of(layers_of("llama", attention_bias=True, mlp_bias=True, head_dim=64))
    assert biased.attention_bias and biased.attention_output_bias and biased.mlp_bias and biased.head_dim == 64
    mistral = config_of(layers_of("mistral", sliding_window=None))
    assert not mistral.attention_bias and not mistral.qk_norm
    qwen3 = config_of(layers_of("qwen3", attention_bias=True))
    assert qwen3.attention_bias and qwen3.attention_output_bias and qwen3.qk_norm


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
def test_legacy_rotary_keys(model_type):
    contents = {**without(layers_of(model_type), "rope_parameters"), "rope_theta": 123456.0}
    parameters = config_of(contents).rope_parameters
    assert parameters["rope_theta"] == 123456.0 and parameters["rope_type"] == "default"
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    parameters = config_of({**contents, "rope_scaling": scaling}).rope_parameters
    assert parameters["rope_type"] == "yarn" and parameters["factor"] == 4.0
    assert parameters["rope_theta"] == 123456.0


def test_legacy_rotary_keys_are_not_written_beside_the_new_ones():
    contents = {**without(RELEASED, "rope_parameters"), "rope_theta": 123456.0}
    config = config_of(contents)
    for layout in LAYOUTS:
        assert config_of(config.to_layout(layout)).rope_parameters["rope_theta"] == 123456.0


# What is no drafter


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (QWEN3_4B, "not that of a DSpark or DFlash drafter: it has no `block_size`, `mask_token_id`, `target_layer_"),
        (without(RELEASED, "mask_token_id"), "Qwen3DSparkModel.*it has no `mask_token_id`"),
        (
            {**QWEN3_4B, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000},
            "LlamaForCausalLMEagle3.*it has no `block_size`",
        ),
        (
            {
                "speculators_model_type": "eagle3",
                "architectures": ["Eagle3Speculator"],
                "transformer_layer_config": without(QWEN3_4B, "model_type") | {"model_type": "llama"},
                "draft_vocab_size": 32000,
                "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
            },
            "Eagle3Speculator.*it has no `block_size`",
        ),
        ({**RELEASED, "model_type": "mamba"}, "is 'mamba', whose layers are not known; known are qwen3"),
        ({**RELEASED, "model_type": "deepseek_v4"}, "is 'deepseek_v4', whose layers are not known"),
        (without(RELEASED, "model_type"), "is None, whose layers are not known"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "T5ForConditionalGeneration"),
    ],
)
def test_other_files_are_refused(contents, words):
    with pytest.raises(ValueError, match=words):
        read_layout(contents)


# Round trips

QWEN3_1_PLUS_N = {**RELEASED, "sample_from_anchor": False, "block_size": 8}
CASES = {
    "qwen3": RELEASED,
    "qwen3-1+n": QWEN3_1_PLUS_N,
    "qwen3-reduced": {**RELEASED, "draft_vocab_size": 32000},
    "qwen3-biases": {**RELEASED, "attention_bias": True},
    "qwen3-rnn": {**RELEASED, "markov_head_type": "rnn", "confidence_head_with_markov": False},
    "qwen3-gated-no-confidence": {**RELEASED, "markov_head_type": "gated", **dict.fromkeys(OPTIONAL[4:], False)}
    | {"confidence_head_with_markov": False},
    "qwen3-dflash": {**without(RELEASED, "confidence_head_with_markov"), **dict.fromkeys(OPTIONAL[2:3], 0)}
    | {"enable_confidence_head": False},
    "qwen3-embedding-tap": {**RELEASED, "target_layer_ids": [-1, 3]},
    "qwen2": layers_of("qwen2", architectures=["Qwen2DSparkModel"]),
    "llama": layers_of("llama", architectures=["LlamaDSparkModel"], head_dim=96),
    "llama-biases": layers_of("llama", attention_bias=True, mlp_bias=True),
    "mistral": layers_of("mistral", sliding_window=None),
    "gemma4": GEMMA4,
    "gemma4-plain": {**GEMMA4, "attention_k_eq_v": False, "final_logit_softcapping": None},
    "dflash-zlab": DFLASH,
    "speculators": {**SPECULATORS, "num_target_layers": 36},
    "nested": {**without(RELEASED, "block_size"), "dspark_config": {"block_size": 5}, "dspark_markov_rank": 8},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_what_is_written_means_what_was_read(name, layout):
    config = config_of(CASES[name])
    contents = json.loads(json.dumps(config.to_layout(layout), default=str))
    lost = ("num_target_layers",) if layout == "speculators" else ()  # the layout has no such key
    again = config_of(contents)
    assert meaning_of(again, lost) == meaning_of(config, lost)
    twice = json.loads(json.dumps(again.to_layout(layout), default=str))
    assert meaning_of(config_of(twice)) == meaning_of(again)
    for other in LAYOUTS:
        third = config_of(json.loads(json.dumps(again.to_layout(other), default=str)))
        assert meaning_of(third, ("num_target_layers",)) == meaning_of(config, ("num_target_layers",))


@pytest.mark.parametrize(
    ("name", "architecture", "model_type"),
    [
        ("qwen3", "Qwen3DSparkModel", "qwen3"),
        ("qwen2", "Qwen2DSparkModel", "qwen2"),
        ("llama", "LlamaDSparkModel", "llama"),
        ("gemma4", "Gemma4DSparkModel", "gemma4_text"),
        ("dflash-zlab", "Qwen3DSparkModel", "qwen3"),
        ("speculators", "Qwen3DSparkModel", "qwen3"),
    ],
)
def test_released_file_has_the_keys_that_engines_read(name, architecture, model_type):
    contents = config_of(CASES[name]).to_layout("released")
    assert contents["architectures"] == [architecture] and contents["model_type"] == model_type
    assert contents["tie_word_embeddings"] is False
    keys = {"block_size", "mask_token_id", "target_layer_ids", "markov_rank", "enable_confidence_head", "num_anchors"}
    keys |= {"hidden_size", "num_hidden_layers", "head_dim", "num_attention_heads", "num_key_value_heads"}
    assert keys <= contents.keys()
    assert ("markov_head_type" in contents) == bool(contents["markov_rank"])
    assert ("confidence_head_with_markov" in contents) == contents["enable_confidence_head"]
    assert contents.get("sample_from_anchor", True) is (name != "dflash-zlab")
    assert ("draft_vocab_size" in contents) == (name == "speculators")
    nested = [key for key in contents if key in ("dspark_config", "dflash_config") or key.startswith("dspark_")]
    assert not nested, "keys that would win over the flat ones"


def test_released_file_is_the_one_that_was_read():
    contents = config_of(RELEASED).to_layout("released")
    changed = {n for n in RELEASED if contents.get(n) != RELEASED[n]}
    assert not changed
    added = contents.keys() - RELEASED.keys()
    assert added <= {"pad_token_id", "transformers_version", "mlp_bias"}


def test_speculators_file_has_the_keys_of_the_project():
    config = config_of({**RELEASED, "target_layer_ids": [-1, 9]})
    contents = config.to_layout("speculators")
    assert contents["speculators_model_type"] == "dspark" and contents["architectures"] == ["DSparkSpeculator"]
    assert contents["aux_hidden_state_layer_ids"] == [0, 10] and "target_layer_ids" not in contents
    assert contents["draft_vocab_size"] == 151936, "the whole one has to be said: the default is 32000"
    assert contents["sample_from_anchor"] is True and contents["block_size"] == 7
    for name in ("mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head"):
        assert contents[name] == RELEASED[name]
    assert contents["transformer_layer_config"]["model_type"] == "qwen3"
    assert contents["transformer_layer_config"]["num_hidden_layers"] == 5
    (method,) = contents["speculators_config"]["proposal_methods"]
    assert method == {
        "proposal_type": "greedy",
        "speculative_tokens": 7,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    assert contents["speculators_config"]["algorithm"] == "dspark"
    assert contents["speculators_config"]["default_proposal_method"] == "greedy"
    assert contents["speculators_config"]["verifier"].keys() == {"name_or_path", "architectures"}


def test_speculators_file_of_1_plus_n_proposes_one_less():
    contents = config_of(QWEN3_1_PLUS_N).to_layout("speculators")
    assert contents["sample_from_anchor"] is False and contents["block_size"] == 8
    assert contents["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7


def test_what_a_file_says_beyond_the_drafter_comes_back():
    contents = {**RELEASED, "sliding_window": None, "use_cache": True, "a_note": "kept"}
    written = config_of(contents).to_layout("released")
    assert written["a_note"] == "kept" and written["use_cache"] is True
    verifier = config_of(SPECULATORS).to_layout("speculators")["speculators_config"]["verifier"]
    assert verifier == SPECULATORS["speculators_config"]["verifier"]


def test_layers_that_no_layout_knows_are_refused():
    config = config_of(RELEASED)
    config.attention_scale = 0.5
    for layout in ("released", "speculators"):
        with pytest.raises(ValueError, match="'attention_scale': 0.5.*layout='dspark'"):
            config.to_layout(layout)
    assert meaning_of(config_of(config.to_layout("dspark")))["attention_scale"] == 0.5
    with pytest.raises(ValueError, match=r"`layout` has to be one of \('released', 'dspark', .* but is 'gguf'"):
        config.to_layout("gguf")


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "gemma4", "dflash-zlab"])
def test_released_file_is_a_plain_configuration_to_autoconfig(tmp_path, name):
    """What `AutoModelForCausalLM` makes of it cannot be stopped; the file keeps its family's type for engines."""
    config = config_of(CASES[name])
    (tmp_path / "config.json").write_text(json.dumps(config.to_layout("released"), default=str))
    plain = AutoConfig.from_pretrained(tmp_path)
    assert plain.model_type == {"gemma4": "gemma4_text", "dflash-zlab": "qwen3"}.get(name, name)
    for field in ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps"):
        assert getattr(plain, field) == getattr(config, field)
    assert plain.block_size == config.block_size and plain.target_layer_ids == config.target_layer_ids


def test_own_file_is_known_to_autoconfig(tmp_path):
    config = config_of(RELEASED)
    (tmp_path / "config.json").write_text(json.dumps(config.to_layout("dspark"), default=str))
    found = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(found, DSparkConfig) and meaning_of(found) == meaning_of(config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_configuration_is_read_from_a_folder_in_every_layout(tmp_path, layout):
    config = config_of(RELEASED)
    (tmp_path / "config.json").write_text(json.dumps(config.to_layout(layout), default=str))
    lost = ("num_target_layers",) if layout == "speculators" else ()
    assert meaning_of(DSparkConfig.from_pretrained(tmp_path), lost) == meaning_of(config, lost)


def test_tables_are_those_of_every_layout():
    model = DSparkModel.from_target(make_model("qwen3"), 60, num_hidden_layers=1, markov_rank=4)
    assert set(TABLES) <= model.state_dict().keys()
