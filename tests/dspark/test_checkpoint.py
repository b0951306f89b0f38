"""Saving and loading: names and shapes in every layout, the files beside the tensors, what is missing."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from hf_specgen import DSparkConfig, DSparkModel
from hf_specgen.dspark import Calibration
from hf_specgen.dspark.calibration import CALIBRATION_FILE
from hf_specgen.dspark.layouts import LAYOUTS
from tests.support.dspark_files import assert_equal_tensors, contents_of, drop, rewritten
from tests.support.dspark_models import (
    MASK,
    SMALL,
    drafter_for,
    gemma4_target,
    states_of,
)
from tests.support.models import make_model

IDS = torch.tensor([[5, 6, 7, 9]])


@pytest.fixture(scope="module")
def target():
    return make_model("qwen3", num_hidden_layers=4)


@pytest.fixture
def model(target):
    return drafter_for(target)


# Names and shapes


def names_of(head: str | None, num_layers: int, tensors_of_layer: list[str]) -> set[str]:
    names = {f"{name}.weight" for name in ("embed_tokens", "lm_head", "fc", "hidden_norm", "norm")}
    names |= {f"layers.{i}.{name}" for i in range(num_layers) for name in tensors_of_layer}
    if head is not None:
        names |= {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
        names |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    if head in ("gated", "rnn"):
        proj = {"gated": "gate_proj", "rnn": "joint_proj"}[head]
        names |= {f"markov_head.{proj}.weight", f"markov_head.{proj}.bias"}
    return names


QWEN3_LAYER = [f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
QWEN3_LAYER += [f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")]
QWEN3_LAYER += ["input_layernorm.weight", "post_attention_layernorm.weight"]


@pytest.mark.parametrize(("head", "count"), [("vanilla", 64), ("gated", 66), ("rnn", 66), (None, 60)])
def test_file_holds_the_tensors_of_a_released_checkpoint(target, tmp_path, head, count):
    settings = {"markov_rank": 0, "enable_confidence_head": False} if head is None else {"markov_head_type": head}
    model = DSparkModel.from_target(target, MASK, **{"markov_rank": 4, **settings})
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == names_of(head, 5, QWEN3_LAYER) and len(tensors) == count
    vocab, hidden, taps = 64, 32, len(model.config.target_layer_ids)
    shapes = {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "fc.weight": (hidden, taps * hidden),
        "layers.3.self_attn.q_proj.weight": (4 * 8, hidden),
        "layers.3.self_attn.k_proj.weight": (2 * 8, hidden),
        "layers.3.self_attn.o_proj.weight": (hidden, 4 * 8),
        "layers.3.self_attn.q_norm.weight": (8,),
        "layers.3.mlp.down_proj.weight": (hidden, 64),
    }
    if head is not None:
        shapes |= {"markov_head.markov_w2.weight": (vocab, 4), "confidence_head.proj.weight": (1, hidden + 4)}
    assert {name: tuple(tensors[name].shape) for name in shapes} == shapes


@pytest.mark.parametrize("key_equals_value", [True, False])
def test_names_of_a_gemma4_drafter(tmp_path, key_equals_value):
    model = DSparkModel.from_target(gemma4_target(key_equals_value), MASK, **SMALL)
    model.save_pretrained(tmp_path)
    layer = [*QWEN3_LAYER, "layer_scalar"]
    layer += ["pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"]
    if key_equals_value:
        layer.remove("self_attn.v_proj.weight")
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == names_of("vanilla", 2, layer)
    assert tensors["layers.0.layer_scalar"].tolist() == [1.0], "a buffer that is stored"
    kv_heads = 1 if key_equals_value else 2
    assert tensors["layers.0.self_attn.k_proj.weight"].shape == (kv_heads * 16, 32)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (4 * 16, 32)


def test_biases_follow_the_family():
    qwen2 = DSparkModel.from_target(make_model("qwen2"), MASK, **SMALL).state_dict()
    biases = {name for name in qwen2 if "layers.0." in name and name.endswith("bias")}
    assert biases == {f"layers.0.self_attn.{name}_proj.bias" for name in "qkv"}
    llama = DSparkModel.from_target(make_model("llama"), MASK, **SMALL).state_dict()
    assert not [name for name in llama if "layers" in name and ("bias" in name or "q_norm" in name)]


def test_reduced_vocabulary_has_its_maps(target):
    tensors = drafter_for(target, draft_vocab_size=10).state_dict()
    assert tensors["lm_head.weight"].shape == (10, 32) and tensors["markov_head.markov_w2.weight"].shape == (10, 4)
    assert tensors["markov_head.markov_w1.weight"].shape == (64, 4)
    assert tensors["d2t"].dtype == torch.int64 and tensors["d2t"].shape == (10,)
    assert tensors["t2d"].dtype == torch.bool and int(tensors["t2d"].sum()) == 10


# Saving and loading


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
def test_what_is_saved_loads_equal(target, tmp_path, layout, reduced):
    model = drafter_for(target, **({"draft_vocab_size": 10} if reduced else {}))
    model.save_pretrained(tmp_path, layout=layout)
    again, info = DSparkModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not again.training
    if layout == "speculators":
        assert again.embed_tokens is None and (again.lm_head is None) == (not reduced)
        again.share_weights(target)
    assert_equal_tensors(again, model)
    assert torch.equal(states_of(again), states_of(model))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loaded_drafters_can_be_saved_again_in_every_layout(target, model, tmp_path, layout):
    expected = states_of(model)
    model.save_pretrained(tmp_path / "first", layout=layout)
    for other in LAYOUTS:
        again = DSparkModel.from_pretrained(tmp_path / "first").share_weights(target)
        again.save_pretrained(tmp_path / other, layout=other)
        third = DSparkModel.from_pretrained(tmp_path / other)
        assert torch.equal(states_of(third, target), expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma2"])
def test_other_families_load_equal(tmp_path, family):
    model = drafter_for(make_model(family))
    layout = "dspark" if family == "gemma2" else "released"
    model.save_pretrained(tmp_path, layout=layout)
    again = DSparkModel.from_pretrained(tmp_path)
    assert_equal_tensors(again, model)
    assert torch.equal(states_of(again), states_of(model))


@pytest.mark.parametrize("key_equals_value", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gemma4_drafters_load_equal(tmp_path, key_equals_value, layout):
    target = gemma4_target(key_equals_value)
    model = drafter_for(target)
    model.layers[0].layer_scalar.fill_(0.5)
    model.save_pretrained(tmp_path, layout=layout)
    again = DSparkModel.from_pretrained(tmp_path)
    assert torch.equal(states_of(again, target), states_of(model))


def test_layers_that_no_published_layout_knows_are_refused_when_saved(tmp_path):
    model = drafter_for(make_model("gemma2"))
    with pytest.raises(ValueError, match="No published layout.*layout='dspark'"):
        model.save_pretrained(tmp_path, layout="released")
    with pytest.raises(ValueError, match="`layout` has to be one of"):
        model.save_pretrained(tmp_path, layout="gguf")
    assert not list(tmp_path.iterdir()), "nothing is written where nothing can be"
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "dspark", "by default what can express it"


def test_sharded_checkpoint_loads_equal(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert names.keys() == model.state_dict().keys()
    assert_equal_tensors(DSparkModel.from_pretrained(tmp_path), model)


def test_sharded_checkpoint_without_tables_loads(target, model, tmp_path):
    model.save_pretrained(tmp_path, layout="speculators", max_shard_size="10KB")
    again = DSparkModel.from_pretrained(tmp_path)
    assert again.embed_tokens is None and again.lm_head is None
    assert_equal_tensors(again.share_weights(target), model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_stays_bf16(target, tmp_path, layout):
    model = drafter_for(copy.deepcopy(target).bfloat16())
    assert model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path, layout=layout)
    again = DSparkModel.from_pretrained(tmp_path, dtype="auto")
    assert again.dtype == torch.bfloat16
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert DSparkModel.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("layout", LAYOUTS)
def test_config_says_the_type_of_the_tensors(target, tmp_path, layout):
    """transformers reads `dtype="auto"` from config.json before it looks at the tensors."""
    drafter_for(target).save_pretrained(tmp_path / "first")
    model = DSparkModel.from_pretrained(tmp_path / "first").bfloat16()
    model.save_pretrained(tmp_path / "second", layout=layout)
    assert DSparkModel.from_pretrained(tmp_path / "second", dtype="auto").dtype == torch.bfloat16


def test_subfolder(model, tmp_path):
    model.confidence_threshold = 0.25
    model.save_pretrained(tmp_path / "drafter")
    again = DSparkModel.from_pretrained(tmp_path, subfolder="drafter")
    assert_equal_tensors(again, model)
    assert again.confidence_threshold == 0.25


def test_own_layout_is_known_to_auto_classes(model, tmp_path):
    model.save_pretrained(tmp_path, layout="dspark")
    assert contents_of(tmp_path)["model_type"] == "dspark"
    assert isinstance(AutoConfig.from_pretrained(tmp_path), DSparkConfig)
    again = AutoModel.from_pretrained(tmp_path)
    assert isinstance(again, DSparkModel)
    assert_equal_tensors(again, model)
    assert isinstance(AutoModel.from_config(model.config), DSparkModel)


def test_other_processes_write_nothing(model, tmp_path):
    model.confidence_threshold = 0.5
    model.save_pretrained(tmp_path, is_main_process=False)
    assert not list(tmp_path.iterdir())


def test_half_written_folder_is_not_pushed(model, tmp_path):
    with pytest.raises(ValueError, match=r"`push_to_hub` would send .* call `model.push_to_hub\(name\)` instead"):
        model.save_pretrained(tmp_path, push_to_hub=True)


def test_saving_leaves_the_drafter_as_it_is(target, model, tmp_path):
    before, logits = model.config.to_dict(), states_of(model)
    for layout in LAYOUTS:
        model.save_pretrained(tmp_path, layout=layout)
    changed = {n for n, v in model.config.to_dict().items() if v != before[n]}
    assert changed <= {"architectures", "dtype"}  # of every model that transformers saves
    assert torch.equal(states_of(model), logits) and model.embed_tokens is not None


# What is loaded is checked


def cut(tensors: dict, name: str, rows: int) -> None:
    tensors[name] = tensors[name][:rows].clone()


LAYER_1 = sorted(f"layers.1.{name}" for name in QWEN3_LAYER)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: drop(t, "fc."), "missing: fc.weight."),
        (lambda t: drop(t, "markov_head."), "missing: markov_head.markov_w1.weight, markov_head.markov_w2.weight."),
        (lambda t: drop(t, "confidence_head.proj.bias"), "missing: confidence_head.proj.bias."),
        (lambda t: drop(t, "layers.1."), f"missing: {', '.join(LAYER_1)}."),
        (lambda t: t.update({"layers.2.mlp.x": torch.ones(1)}), "unexpected: layers.2.mlp.x."),
        (lambda t: t.update({"model.fc.weight2": torch.ones(1)}), "unexpected: model.fc.weight2."),
        (lambda t: t.update({"d2t": torch.ones(3).long()}), "unexpected: d2t."),
        (
            lambda t: (drop(t, "norm."), t.update({"foo": torch.ones(1)})),
            "missing: norm.weight; unexpected: foo.",
        ),
    ],
    ids=["fc", "markov", "bias", "layer", "extra layer", "extra", "d2t", "two"],
)
@pytest.mark.parametrize("shard_size", ["1GB", "10KB"])
def test_missing_and_unexpected_tensors_are_named(model, tmp_path, change, words, shard_size):
    tensors = model.state_dict()
    change(tensors)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    if shard_size == "1GB":
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    else:
        files = {name: f"model-{i:05}-of-{len(tensors):05}.safetensors" for i, name in enumerate(tensors)}
        for name, file in files.items():
            save_file({name: tensors[name]}, tmp_path / file, metadata={"format": "pt"})
        index = {"metadata": {"total_size": 1}, "weight_map": files}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="does not hold the tensors of its configuration; " + re.escape(words)):
        DSparkModel.from_pretrained(tmp_path)


def test_misshapen_tensors_are_named(model, tmp_path):
    shapes = {
        "fc.weight": (32, 96),
        "layers.1.mlp.up_proj.weight": (64, 32),
        "markov_head.markov_w2.weight": (64, 4),
        "lm_head.weight": (64, 32),
    }
    for name, shape in shapes.items():
        model.save_pretrained(tmp_path / name)
        rewritten(tmp_path / name, lambda tensors, name=name: cut(tensors, name, 3))
        with pytest.raises(ValueError, match=re.escape(f"misshapen: {name} {(3, shape[1])} instead of {shape}")):
            DSparkModel.from_pretrained(tmp_path / name)


def test_misshapen_tensors_cannot_be_ignored(model, tmp_path):
    model.save_pretrained(tmp_path)
    rewritten(tmp_path, lambda tensors: cut(tensors, "fc.weight", 3))
    with pytest.raises(ValueError, match=r"misshapen: fc.weight \(3, 96\) instead of \(32, 96\)"):
        DSparkModel.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


def test_tensors_of_other_projects_that_say_nothing_are_passed_over(model, tmp_path):
    model.save_pretrained(tmp_path)
    extra = {"verifier_lm_head.weight": torch.ones(2), "verifier_norm.weight": torch.ones(2)}
    extra["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    rewritten(tmp_path, lambda tensors: tensors.update(extra))
    assert_equal_tensors(DSparkModel.from_pretrained(tmp_path), model)


def test_head_of_a_reduced_vocabulary_cannot_come_from_the_target(target, tmp_path):
    drafter_for(target, draft_vocab_size=10).save_pretrained(tmp_path)
    rewritten(tmp_path, lambda tensors: drop(tensors, "lm_head"))
    with pytest.raises(ValueError, match="missing: lm_head.weight"):
        DSparkModel.from_pretrained(tmp_path)


# The files beside the tensors


def test_threshold_is_written_and_read(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "generation_config.json").exists()
    assert DSparkModel.from_pretrained(tmp_path).confidence_threshold == 0.0
    model.confidence_threshold = 0.3
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written["assistant_confidence_threshold"] == 0.3
    again = DSparkModel.from_pretrained(tmp_path)
    assert again.confidence_threshold == 0.3
    assert again.generation_config.assistant_confidence_threshold == 0.0, "transformers' own loop would act on it"


@pytest.mark.parametrize("file", ["generation_config.json", CALIBRATION_FILE])
def test_what_was_taken_away_is_gone_from_the_folder(model, tmp_path, file):
    model.confidence_threshold = 0.3
    model.calibration = Calibration((1.0, 1.5, 2.0, 0.5))
    model.save_pretrained(tmp_path)
    model.confidence_threshold = 0.0
    model.calibration = None
    model.save_pretrained(tmp_path)
    again = DSparkModel.from_pretrained(tmp_path)
    assert again.confidence_threshold == 0.0 if file == "generation_config.json" else again.calibration is None


def test_calibration_is_written_and_read(model, tmp_path):
    model.calibration = Calibration((1.0, 1.5, 2.0, 0.5))
    model.save_pretrained(tmp_path)
    assert DSparkModel.from_pretrained(tmp_path).calibration.temperatures == (1.0, 1.5, 2.0, 0.5)


def test_calibration_for_other_blocks_is_refused(model, tmp_path):
    model.save_pretrained(tmp_path)
    Calibration((1.0,) * 5).save(tmp_path)
    with pytest.raises(ValueError, match="fitted for blocks of 5 candidates, but the drafter proposes 4"):
        DSparkModel.from_pretrained(tmp_path)
