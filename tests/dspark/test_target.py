"""New drafters for a target, its tables, and targets that do not fit."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_specgen import DSparkConfig, DSparkDrafter, DSparkModel, enable_speculation
from hf_specgen.dspark import Calibration
from hf_specgen.dspark.layouts import LAYOUTS
from hf_specgen.dspark.target import default_target_layer_ids
from tests.support.dspark_files import LAYERS, LONGROPE, SCALING, assert_equal_tensors, drop, refuse, rewritten
from tests.support.dspark_models import (
    MASK,
    SMALL,
    all_targets,
    drafter_for,
    states_of,
    target_of,
)
from tests.support.models import make_model

IDS = torch.tensor([[5, 6, 7, 9]])


@pytest.fixture(scope="module")
def target():
    return make_model("qwen3", num_hidden_layers=4)


@pytest.fixture
def model(target):
    return drafter_for(target)


# Embedding and head


def without_tables(model: DSparkModel, folder: Path, *names: str) -> DSparkModel:
    model.save_pretrained(folder)
    rewritten(folder, lambda tensors: [drop(tensors, name) for name in names or ("embed_tokens", "lm_head")])
    return DSparkModel.from_pretrained(folder)


@pytest.mark.parametrize("names", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
def test_absent_tables_are_taken_from_the_target(target, model, tmp_path, names):
    again = without_tables(model, tmp_path, *names)
    for name in ("embed_tokens", "lm_head"):
        assert (getattr(again, name) is None) == (name in names)
        assert (f"{name}.weight" in again.state_dict()) == (name not in names)
    assert torch.equal(states_of(again, target), states_of(model))
    with pytest.raises(ValueError, match="has no token embeddings or head of its own: pass the `target`"):
        states_of(again)
    plain = target.generate(IDS, max_new_tokens=12, do_sample=False)
    assert target.generate(IDS, assistant_model=again, max_new_tokens=12, do_sample=False).tolist() == plain.tolist()


def test_absent_tables_are_told_when_the_released_layout_is_asked_for(target, model, tmp_path):
    again = without_tables(model, tmp_path / "without")
    with pytest.raises(ValueError, match=r"takes from its target: call `share_weights\(target\)` first"):
        again.save_pretrained(tmp_path / "released")
    again.save_pretrained(tmp_path / "dspark", layout="dspark")
    assert DSparkModel.from_pretrained(tmp_path / "dspark").lm_head is None


def test_equal_tables_are_shared(target, model):
    assert model.embed_tokens.weight.data_ptr() != target.get_input_embeddings().weight.data_ptr()
    logits = states_of(model)
    assert model.share_weights(target) is model
    assert model.embed_tokens.weight is target.get_input_embeddings().weight
    assert model.lm_head.weight is target.get_output_embeddings().weight
    assert torch.equal(states_of(model), logits)


def test_absent_tables_are_shared(target, model, tmp_path):
    again = without_tables(model, tmp_path).share_weights(target)
    assert again.embed_tokens.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    assert again.lm_head.weight.data_ptr() == target.get_output_embeddings().weight.data_ptr()
    assert torch.equal(states_of(again), states_of(model))


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_tables_that_differ_are_kept(target, model, name):
    with torch.no_grad():
        getattr(model, name).weight[3, 3] += 1e-3
    logits = states_of(model)
    model.share_weights(target)
    tables = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}
    for other, table in tables.items():
        assert (getattr(model, other).weight is table.weight) == (other != name)
    assert torch.equal(states_of(model), logits)


def test_head_of_a_reduced_vocabulary_is_kept(target):
    model = drafter_for(target, draft_vocab_size=10).share_weights(target)
    assert model.lm_head.weight.shape == (10, 32)
    assert model.embed_tokens.weight is target.get_input_embeddings().weight


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_shared_drafters_are_saved_whole(tmp_path, is_tied, layout):
    target = make_model("qwen3", tie_word_embeddings=is_tied)
    model = drafter_for(target)
    expected = states_of(model)
    model.share_weights(target)
    assert (model.lm_head.weight is model.embed_tokens.weight) == is_tied
    model.save_pretrained(tmp_path, layout=layout)
    names = load_file(tmp_path / "model.safetensors").keys()
    has_tables = {"embed_tokens.weight", "lm_head.weight"} <= names
    assert has_tables == (layout != "speculators")
    again = DSparkModel.from_pretrained(tmp_path)
    assert torch.equal(states_of(again, target), expected)
    if has_tables:
        assert_equal_tensors(again, model)
        assert again.lm_head.weight is not again.embed_tokens.weight


def test_sharing_with_another_target_is_refused(model):
    with pytest.raises(ValueError, match="belongs to another target"):
        model.share_weights(make_model("qwen3", num_hidden_layers=4, hidden_size=16))


# New drafters


@pytest.mark.parametrize("family", all_targets())
def test_new_drafter_for_every_family(family):
    target = target_of(family)
    torch.manual_seed(0)
    model = DSparkModel.from_target(target, MASK, **SMALL)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())
    assert torch.equal(model.embed_tokens.weight, target.get_input_embeddings().weight)
    assert torch.equal(model.lm_head.weight, target.get_output_embeddings().weight)
    assert model.embed_tokens.weight is not target.get_input_embeddings().weight
    depth = target.config.get_text_config().num_hidden_layers
    assert model.config.num_target_layers == depth and model.config.target_layer_ids[-1] < depth - 1
    scale = getattr(target.get_input_embeddings(), "scalar_embed_scale", 1.0)
    embedded, expected = model.embed(IDS), target.get_input_embeddings()(IDS)
    torch.testing.assert_close(embedded, expected, rtol=0, atol=1e-6 * scale)
    plain = target.generate(IDS, max_new_tokens=10, do_sample=False)
    found = target.generate(IDS, assistant_model=model, max_new_tokens=10, do_sample=False)
    assert found.tolist() == plain.tolist()
    enabled = enable_speculation(target)
    found = enabled.generate(IDS, assistant_model=model, max_new_tokens=10, do_sample=False)
    assert found.tolist() == plain.tolist() and enabled.speculation_stats.drafting_rounds > 0


def test_new_drafter_has_the_defaults_of_the_release(target):
    config = DSparkModel.from_target(target, MASK).config
    assert (config.num_hidden_layers, config.block_size, config.markov_rank) == (5, 7, 256)
    assert config.markov_head_type == "vanilla" and config.sample_from_anchor
    assert config.enable_confidence_head and config.confidence_head_with_markov
    assert config.mask_token_id == MASK and config.num_anchors == 512


def test_new_drafter_without_a_markov_head_has_a_confidence_head_that_needs_none(target):
    config = DSparkModel.from_target(target, MASK, markov_rank=0).config
    assert config.enable_confidence_head and not config.confidence_head_with_markov


def test_new_drafter_is_as_large_as_a_released_one():
    """Parameters of `dspark_qwen3_4b_block7`, embedding and head included: 1.393 billion, 615.2 million trained."""
    config = DSparkConfig(
        target_layer_ids=[1, 9, 17, 25, 33],
        mask_token_id=151669,
        markov_rank=256,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    with torch.device("meta"):
        model = DSparkModel(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    tables = model.embed_tokens.weight.numel() + model.lm_head.weight.numel()
    assert round(total / 1e9, 3) == 1.393 and round((total - tables) / 1e6, 1) == 615.2
    assert len(model.state_dict()) == 64
    assert model.confidence_head.proj.weight.shape == (1, 2816)


@pytest.mark.parametrize(
    ("depth", "layer_ids"),
    [(36, [1, 9, 17, 25, 33]), (40, [1, 10, 19, 28, 37]), (8, [1, 2, 3, 4, 5]), (4, [0, 1, 2]), (2, [0]), (1, [-1])],
)
def test_layers_that_are_tapped_by_default(depth, layer_ids):
    assert default_target_layer_ids(depth) == layer_ids


def test_random_state_decides_the_new_weights(target):
    torch.manual_seed(3)
    first = DSparkModel.from_target(target, MASK, **SMALL)
    torch.manual_seed(3)
    second = DSparkModel.from_target(target, MASK, **SMALL)
    assert_equal_tensors(second, first)
    assert 0.01 < float(first.fc.weight.detach().std()) < 0.03, "`initializer_range`"
    assert bool((first.norm.weight == 1.0).all())


# Bad input: settings and targets


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_size": 0}, "`block_size` has to be an int of at least 1, but is 0"),
        ({"block_size": 1, "sample_from_anchor": False}, "`block_size` has to be at least 2"),
        ({"target_layer_ids": [0, 3]}, "name the last layer"),
        ({"target_layer_ids": [7]}, "name a layer outside the target"),
        ({"target_layer_ids": [1, 0]}, LAYERS),
        ({"markov_rank": 0, "confidence_head_with_markov": True}, "needs a Markov head, but `markov_rank` is 0"),
        ({"markov_head_type": "lstm"}, "`markov_head_type` has to be one of"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding windows are not supported"),
        ({"rope_parameters": {**SCALING, "rope_type": "dynamic"}}, "whose frequencies change with the length"),
        ({"blocksize": 4}, "`blocksize` is not a field of `DSparkConfig`"),
        ({"hidden_size": 16}, "`hidden_size` has to be the target's, 32, but is 16"),
        ({"embedding_scale": float("inf")}, "`embedding_scale` has to be a finite number, but is inf"),
    ],
    ids=str,
)
def test_settings_of_a_new_drafter_are_checked(target, settings, words):
    with pytest.raises(ValueError, match=words):
        DSparkModel.from_target(target, MASK, **SMALL | settings)


def test_widths_of_a_new_drafter_are_checked(target):
    accepted = []
    for name, value in (("num_key_value_heads", 3), ("num_key_value_heads", 0), ("head_dim", 0), ("head_dim", 7)):
        try:
            states_of(DSparkModel.from_target(target, MASK, **SMALL, **{name: value}))
            accepted.append((name, value))
        except Exception as error:
            if not isinstance(error, ValueError) or name not in str(error):
                accepted.append((name, value, repr(error)))
    print(accepted)
    assert not accepted


@pytest.mark.parametrize("mask", [64, -1])
def test_mask_token_of_a_new_drafter_is_checked(target, mask):
    with pytest.raises(ValueError, match="`mask_token_id` has to be an id below the `vocab_size` of 64"):
        DSparkModel.from_target(target, mask, **SMALL)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_new_drafter_for_a_target_whose_positions_change_with_the_length(rope):
    parameters = LONGROPE if rope == "longrope" else {**SCALING, "rope_type": rope}
    target = make_model("llama", rope_parameters=dict(parameters), original_max_position_embeddings=64)
    with pytest.raises(ValueError, match=f"'{rope}', whose frequencies change.* give the drafter another type"):
        DSparkModel.from_target(target, MASK, **SMALL)
    model = DSparkModel.from_target(target, MASK, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **SMALL)
    assert model.config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden_size": 16}, "hidden size of 32, but `Qwen3ForCausalLM` has 16: it belongs to another target"),
        ({"num_hidden_layers": 6}, "number of target layers of 4, but `Qwen3ForCausalLM` has 6"),
        ({"vocab_size": 128}, "vocabulary of 128 ids and the draft one of 64|have different tokenizers"),
    ],
    ids=str,
)
def test_another_target_is_refused_by_both_entry_points(model, settings, words):
    other = make_model("qwen3", **{"num_hidden_layers": 4} | settings)
    call = {"assistant_model": model, "max_new_tokens": 6, "do_sample": False}
    expected = other.generate(IDS, max_new_tokens=6, do_sample=False)
    for caller in (other, enable_speculation(copy.deepcopy(other))):
        with pytest.raises(ValueError, match=words):
            caller.generate(IDS, **call)
        assert caller.generate(IDS, max_new_tokens=6, do_sample=False).tolist() == expected.tolist()
    with pytest.raises(ValueError, match=words):
        DSparkDrafter(model).bind(other)
    with pytest.raises(ValueError, match=words):
        model.share_weights(other)


def test_depth_that_no_file_says_is_found_when_bound(target):
    model = drafter_for(target, num_target_layers=None, target_layer_ids=[0, 1, 2])
    with pytest.raises(ValueError, match=r"\[0, 1, 2\] name the last layer: of 3 layers.*count from 1"):
        DSparkDrafter(model).bind(make_model("qwen3", num_hidden_layers=3))
    with pytest.raises(ValueError, match=r"name a layer outside the target: of 2 layers those from 0 to 0 can"):
        DSparkDrafter(model).bind(make_model("qwen3", num_hidden_layers=2))


def test_target_with_a_padded_vocabulary_gives_no_tables(target, model, tmp_path):
    without = without_tables(model, tmp_path)
    padded = make_model("qwen3", num_hidden_layers=4, vocab_size=70)
    with pytest.raises(ValueError, match="which has 70 rows, but it was made for a vocabulary of 64"):
        DSparkDrafter(without).bind(padded)
    DSparkDrafter(model).bind(padded)


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (ValueError, "`num_assistant_tokens` has to be at most 4, which is what a block", {"num_assistant_tokens": 5}),
        (ValueError, "`num_assistant_tokens`.* is 0", {"num_assistant_tokens": 0}),
        (TypeError, "`num_assistant_tokens`.* is 2.5", {"num_assistant_tokens": 2.5}),
        (ValueError, "'constant' for a DSpark.* is 'heuristic'", {"num_assistant_tokens_schedule": "heuristic"}),
        (ValueError, r"`assistant_confidence_threshold`.* is 1\.5", {"assistant_confidence_threshold": 1.5}),
        (ValueError, r"`assistant_confidence_threshold`.* is -0\.1", {"assistant_confidence_threshold": -0.1}),
        (ValueError, "`assistant_confidence_threshold`.* is nan", {"assistant_confidence_threshold": float("nan")}),
        (ValueError, "`assistant_confidence_threshold`.* is 'x'", {"assistant_confidence_threshold": "x"}),
        (
            ValueError,
            "`max_matching_ngram_size` is given, but a draft model has",
            {"max_matching_ngram_size": 2},
        ),
    ],
    ids=str,
)
def test_arguments_of_generate_are_checked(target, model, error, words, arguments):
    enabled = enable_speculation(copy.deepcopy(target))
    with pytest.raises(error, match=words):
        enabled.generate(IDS, assistant_model=model, max_new_tokens=6, do_sample=False, **arguments)
    expected = target.generate(IDS, max_new_tokens=6, do_sample=False)
    found = enabled.generate(IDS, assistant_model=model, max_new_tokens=6, do_sample=False)
    assert found.tolist() == expected.tolist()


def test_threshold_needs_a_confidence_head(target):
    model = drafter_for(target, enable_confidence_head=False)
    enabled = enable_speculation(copy.deepcopy(target))
    settings = {"assistant_model": model, "max_new_tokens": 6, "do_sample": False}
    with pytest.raises(ValueError, match="needs confidences, but the drafter has no confidence head"):
        enabled.generate(IDS, assistant_confidence_threshold=0.5, **settings)
    model.confidence_threshold = 0.5
    with pytest.raises(ValueError, match="needs confidences, but the drafter has no confidence head"):
        enabled.generate(IDS, **settings)
    with pytest.raises(ValueError, match="`confidence_threshold` is 0.5, but the drafter has no confidence head"):
        target.generate(IDS, **settings)


def test_threshold_of_a_file_needs_a_confidence_head(target, tmp_path):
    model = drafter_for(target, enable_confidence_head=False)
    model.confidence_threshold = 0.5
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="confidence head"):
        DSparkModel.from_pretrained(tmp_path)


def test_numbers_of_candidates_of_a_file_are_read_and_written(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "generation_config.json").exists()
    model.generation_config.num_assistant_tokens = 2
    model.save_pretrained(tmp_path)
    again = DSparkModel.from_pretrained(tmp_path)
    assert again.generation_config.num_assistant_tokens == 2
    (tmp_path / "generation_config.json").write_text(json.dumps({"num_assistant_tokens": 99}))
    refuse(tmp_path, "`num_assistant_tokens` has to be at most")


@pytest.mark.parametrize("threshold", [-0.5, float("nan"), None, "x", True])
def test_threshold_of_a_drafter_is_checked(model, threshold):
    with pytest.raises(ValueError, match=r"`assistant_confidence_threshold` has to be in \[0, 1\]"):
        model.confidence_threshold = threshold


def test_calibration_of_a_drafter_is_checked(model):
    with pytest.raises(ValueError, match="was fitted for blocks of 1 candidates"):
        model.calibration = Calibration((1.0,))


@pytest.mark.parametrize("shift", [100, -1])
def test_reduced_vocabulary_that_leaves_the_target_is_refused(target, tmp_path, shift):
    model = DSparkModel.from_target(target, MASK, **SMALL, draft_vocab_size=40)
    assert torch.equal(model.lm_head.weight, target.lm_head.weight[:40])
    model.d2t.add_(shift)
    model.save_pretrained(tmp_path)
    refuse(tmp_path, "`d2t` has to give 40 different ids")


def test_reduced_vocabulary_with_an_id_twice_is_refused(target, tmp_path):
    model = DSparkModel.from_target(target, MASK, **SMALL, draft_vocab_size=40)
    model.d2t[3] = -1
    model.save_pretrained(tmp_path)
    refuse(tmp_path, "`d2t` has to give 40 different ids")
