"""What a config.json may say."""

import json
from pathlib import Path

import pytest
import torch

from hf_specgen import DSparkModel
from tests.support.dspark_files import LAYERS, LONGROPE, SCALING, edited, refuse
from tests.support.dspark_models import drafter_for, gemma4_target
from tests.support.models import make_model

IDS = torch.tensor([[5, 6, 7, 9]])


@pytest.fixture(scope="module")
def target():
    return make_model("qwen3", num_hidden_layers=4)


@pytest.fixture
def model(target):
    return drafter_for(target)


# Bad input: files


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 0}, "`block_size` has to be an int of at least 1, but is 0"),
        ({"block_size": 2.5}, "`block_size` has to be an int of at least 1, but is 2.5"),
        ({"block_size": [4]}, r"`block_size` has to be an int of at least 1, but is \[4\]"),
        ({"block_size": True}, "`block_size` has to be an int of at least 1, but is True"),
        ({"block_size": None}, "it has no `block_size`"),
        ({"block_size": 1, "sample_from_anchor": False}, "`block_size` has to be at least 2 where the anchor"),
        ({"mask_token_id": 64}, "`mask_token_id` has to be an id below the `vocab_size` of 64, but is 64"),
        ({"mask_token_id": -1}, "`mask_token_id` has to be an id below .* but is -1"),
        ({"mask_token_id": None}, "it has no `mask_token_id`"),
        ({"target_layer_ids": [0, 1, 3]}, r"\[0, 1, 3\] name the last layer: of 4 layers those from 0 to 2 can be"),
        ({"target_layer_ids": [0, 1, 4]}, r"\[0, 1, 4\] name a layer outside the target: of 4 layers"),
        ({"target_layer_ids": [2, 1, 0]}, rf"{LAYERS}.* but is \[2, 1, 0\]"),
        ({"target_layer_ids": [0, 0, 1]}, rf"{LAYERS}.* but is \[0, 0, 1\]"),
        ({"target_layer_ids": [-2, 0, 1]}, rf"{LAYERS}.* but is \[-2, 0, 1\]"),
        ({"target_layer_ids": []}, rf"{LAYERS}.* but is \[\]"),
        (
            {"target_layer_ids": ["0", "1", "2"]},
            r"`target_layer_ids` has to be a list of ints, but is \['0', '1', '2'\]",
        ),
        ({"target_layer_ids": None}, "it has no `target_layer_ids`"),
        ({"markov_rank": 0}, "`confidence_head_with_markov` needs a Markov head, but `markov_rank` is 0"),
        ({"markov_rank": None}, "`confidence_head_with_markov` needs a Markov head, but `markov_rank` is 0"),
        ({"markov_rank": -4}, "`markov_rank` has to be an int of at least 0, but is -4"),
        ({"markov_rank": "4"}, "`markov_rank` has to be an int of at least 0, but is '4'"),
        ({"markov_head_type": "lstm"}, r"`markov_head_type` has to be one of \('vanilla', 'gated', 'rnn'\), but is"),
        ({"draft_vocab_size": 65}, "`draft_vocab_size` has to be between 1 and the `vocab_size` of 64, but is 65"),
        ({"draft_vocab_size": 0}, "`draft_vocab_size` has to be between 1 and .* but is 0"),
        ({"rope_parameters": {**SCALING, "rope_type": "dynamic"}}, "'dynamic', whose frequencies change with the len"),
        ({"rope_parameters": LONGROPE}, "'longrope', whose frequencies change with the length"),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True},
            "'full_attention' for each of 2 layers, but is .*'sliding_attention'.*sliding windows are not supported",
        ),
        (
            {"layer_types": ..., "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
            "sliding windows are not supported",
        ),
        ({"hidden_size": 0}, "`hidden_size` has to be an int of at least 1, but is 0"),
        ({"vocab_size": -64}, "`vocab_size` has to be an int of at least 1, but is -64"),
        ({"model_type": ...}, "layers are not known; known are qwen3, qwen2"),
        ({"model_type": ["qwen3"]}, "layers are not known; known are qwen3, qwen2"),
    ],
)
def test_settings_of_a_file_are_checked(model, tmp_path, changes, words):
    refuse(edited(model, tmp_path, changes), words)


def offences(model: DSparkModel, folder: Path, cases: list[dict], layout: str = "released") -> list[str]:
    """The cases that load, or whose error is no ValueError or TypeError that names the key and ends as a sentence."""
    found = []
    for number, changes in enumerate(cases):
        name = min(changes)
        edited(model, folder / str(number), changes, layout)
        try:
            DSparkModel.from_pretrained(folder / str(number))
        except (ValueError, TypeError) as error:
            if name not in str(error) or not str(error).rstrip().endswith("."):
                found.append(f"{changes}: {type(error).__name__}: {error}")
        except Exception as error:
            found.append(f"{changes}: {type(error).__name__}: {error}")
        else:
            found.append(f"{changes}: loads")
    print("\n".join(found))
    return found


def test_wrong_types_of_a_file_are_refused(model, tmp_path):
    cases = [
        {"hidden_size": None},
        {"hidden_size": "32"},
        {"intermediate_size": [64]},
        {"num_hidden_layers": None},
        {"num_hidden_layers": 3},
        {"num_attention_heads": 4.0},
        {"num_key_value_heads": "2"},
        {"head_dim": 7},
        {"head_dim": None},
        {"vocab_size": None},
        {"rms_norm_eps": None},
        {"rope_parameters": [1]},
        {"layer_types": [1]},
        {"layer_types": ["full_attention"]},
        {"eos_token_id": "2"},
    ]
    assert not offences(model, tmp_path, cases)


def test_broken_keys_are_named(model, tmp_path):
    cases = [
        {"rope_parameters": {**SCALING, "rope_type": "foo"}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}},
        {"hidden_act": "foo"},
        {"head_dim": -8},
        {"num_key_value_heads": -2},
        {"intermediate_size": -1},
        {"num_target_layers": "4"},
        {"num_target_layers": [4]},
        {"target_layer_ids": 3},
        {"target_layer_ids": 0.5},
        {"mask_token_id": "60"},
        {"mask_token_id": [60]},
        {"draft_vocab_size": "64"},
        {"dspark_config": [1]},
        {"dflash_config": 3},
        {"text_config": "x"},
        {"architectures": 3},
    ]
    assert not offences(model, tmp_path, cases)


def test_wrong_types_are_not_taken_for_something(model, tmp_path):
    cases = [
        {"enable_confidence_head": "false"},
        {"sample_from_anchor": "false"},
        {"num_anchors": [512]},
        {"mask_token_id": 4.0},
        {"attention_dropout": -1},
    ]
    assert not offences(model, tmp_path, cases)


def test_broken_keys_of_a_speculators_file_are_named(model, tmp_path):
    cases = [
        {"aux_hidden_state_layer_ids": None},
        {"aux_hidden_state_layer_ids": 3},
        {"aux_hidden_state_layer_ids": ["1", "2", "3"]},
        {"transformer_layer_config": ...},
        {"transformer_layer_config": None},
        {"transformer_layer_config": []},
    ]
    assert not offences(model, tmp_path, cases, layout="speculators")


def test_gemma4_file_that_lacks_keys(tmp_path):
    cases = [{"hidden_size": ...}, {"global_head_dim": ..., "head_dim": ...}, {"num_key_value_heads": ...}]
    assert not offences(drafter_for(gemma4_target(False)), tmp_path, cases)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": ...}, "it has no `block_size`"),
        ({"mask_token_id": None}, "it has no `mask_token_id`"),
        ({"aux_hidden_state_layer_ids": ...}, "it has no `target_layer_ids`"),
        ({"aux_hidden_state_layer_ids": [3, 2, 1]}, rf"{LAYERS}.*\[2, 1, 0\]"),
        ({"draft_vocab_size": 100}, "`draft_vocab_size` has to be between"),
    ],
    ids=str,
)
def test_settings_of_a_speculators_file_are_checked(model, tmp_path, changes, words):
    folder = edited(model, tmp_path, changes, layout="speculators")
    with pytest.raises(ValueError, match=words):
        DSparkModel.from_pretrained(folder)


def test_empty_configuration(model, tmp_path):
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    refuse(tmp_path, LAYERS)


def test_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(OSError, match=f"found in directory {tmp_path}"):
        DSparkModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("threshold", [1.5, -0.1, "0.5", True, [0.5]])
def test_threshold_of_a_file_is_checked(model, tmp_path, threshold):
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"assistant_confidence_threshold": threshold}))
    refuse(tmp_path, r"`assistant_confidence_threshold` has to be in \[0, 1\], but is")


@pytest.mark.parametrize("text", ["[]", '{"assistant_confidence'])
def test_broken_generation_config(model, tmp_path, text):
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match="generation_config.json"):
        DSparkModel.from_pretrained(tmp_path)
