import copy
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Gemma4TextConfig, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from hf_specgen import DSparkConfig, DSparkDrafter, DSparkModel, enable_speculation
from hf_specgen.dspark import Calibration
from hf_specgen.dspark.backbone import DSparkRotaryEmbedding, attend
from hf_specgen.dspark.calibration import CALIBRATION_FILE
from hf_specgen.dspark.layouts import LAYOUTS
from hf_specgen.dspark.target import default_target_layer_ids
from tests.support.models import FAMILIES, left_padded, make_model

SMALL = {"num_hidden_layers": 2, "block_size": 4, "markov_rank": 4}
MASK = 60
IDS = torch.tensor([[5, 6, 7, 9]])


@pytest.fixture(scope="module")
def target():
    return make_model("qwen3", num_hidden_layers=4)


@pytest.fixture
def model(target):
    return drafter_for(target)


def drafter_for(target, seed: int = 0, **settings) -> DSparkModel:
    """An untrained drafter without any parameter at 0 or 1."""
    torch.manual_seed(seed)
    model = DSparkModel.from_target(target, MASK, **SMALL | settings).eval()
    tables = {id(model.embed_tokens.weight), id(model.lm_head.weight)}
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) not in tables:
                parameter.normal_(mean=1.0 if parameter.ndim == 1 else 0.0, std=0.2)
    return model


def gemma4_target(key_equals_value: bool, **settings):
    config = Gemma4TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=key_equals_value,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=64,
        max_position_embeddings=256,
        sliding_window=8,
        final_logit_softcapping=30.0,
        **settings,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def states_of(model: DSparkModel, target=None) -> torch.Tensor:
    """What a drafter makes of fixed random context and block."""
    generator = torch.Generator().manual_seed(7)
    width = len(model.config.target_layer_ids) * model.config.hidden_size
    context = torch.randn(1, 6, width, generator=generator).to(model.dtype)
    block = torch.tensor([[5] + [MASK] * (model.config.block_size - 1)])
    positions = torch.arange(6, 6 + model.config.block_size)[None]
    hidden = model(block, positions, context, torch.arange(6)[None], target=target).last_hidden_state
    return model.base_logits(hidden, target)


def assert_equal_tensors(actual: DSparkModel, expected: DSparkModel) -> None:
    found, wanted = actual.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def contents_of(folder) -> dict:
    return json.loads((Path(folder) / "config.json").read_text())


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


def rewritten(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut(tensors: dict, name: str, rows: int) -> None:
    tensors[name] = tensors[name][:rows].clone()


def drop(tensors: dict, prefix: str) -> None:
    for name in [name for name in tensors if name.startswith(prefix)]:
        del tensors[name]


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


# New drafters


def all_targets():
    return [*FAMILIES, "gemma4", "gemma4-k-eq-v"]


def target_of(family: str):
    return gemma4_target(family == "gemma4-k-eq-v") if family.startswith("gemma4") else make_model(family)


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


# As a module


def test_deepcopy_and_pickle(model):
    model.confidence_threshold = 0.4
    model.calibration = Calibration((1.0, 1.5, 2.0, 0.5))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal_tensors(again, model)
        assert again.confidence_threshold == 0.4 and again.calibration == model.calibration
        assert torch.equal(states_of(again), states_of(model))
        assert again.fc.weight.data_ptr() != model.fc.weight.data_ptr()


def test_meta_device(model):
    with torch.device("meta"):
        empty = DSparkModel(model.config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    empty.rotary_emb = DSparkRotaryEmbedding(model.config)  # its frequencies are in no checkpoint
    assert torch.equal(states_of(empty), states_of(model))


def test_frequencies_are_right_after_loading(model, tmp_path):
    """They are not stored, and loading makes the model on the meta device."""
    model.save_pretrained(tmp_path)
    again = DSparkModel.from_pretrained(tmp_path)
    assert torch.equal(again.rotary_emb.inv_freq, DSparkRotaryEmbedding(model.config).inv_freq)


def test_train_and_eval(target, tmp_path):
    model = drafter_for(target, attention_dropout=0.5)
    assert DSparkModel.from_target(target, MASK, **SMALL).training
    model.save_pretrained(tmp_path)
    assert not DSparkModel.from_pretrained(tmp_path).training
    assert torch.equal(states_of(model), states_of(model))
    model.train()
    assert not torch.equal(states_of(model), states_of(model)), "dropout is for training only"


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "gemma4", "gemma4-k-eq-v"])
def test_gradients_reach_every_parameter(family, head):
    model = drafter_for(target_of(family), markov_head_type=head).train()
    frozen = (model.embed_tokens, model.lm_head)
    for table in frozen:
        table.requires_grad_(False)
    width = len(model.config.target_layer_ids) * 32
    block = torch.tensor([[5, MASK, MASK, MASK], [6, MASK, MASK, MASK]])
    positions = torch.arange(6, 10).expand(2, -1)
    states = model(block, positions, torch.randn(2, 6, width), torch.arange(6).expand(2, -1)).last_hidden_state
    logits = []
    confidences = model.unroll(
        states, model.base_logits(states), block[:, 0], lambda _, found: logits.append(found) or found.argmax(dim=-1)
    )
    loss = torch.stack(logits).square().mean() + torch.stack(logits).logsumexp(dim=-1).mean()
    (loss + confidences.square().mean()).backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    biases = {f"layers.{i}.self_attn.k_proj.bias" for i in range(2)}  # moves all scores of a query alike, but for rope
    assert not set(without) - biases
    assert all(p.grad is None for table in frozen for p in table.parameters())


# Attention and positions


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1000000.0}


@pytest.mark.parametrize("rope", [DEFAULT, YARN, LLAMA3, LINEAR], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_cosines_equal_those_of_transformers(family, rope):
    target = make_model(family, rope_parameters=dict(rope), head_dim=16)
    model = DSparkModel.from_target(target, MASK, **SMALL)
    config_class, reference = {
        "qwen3": (Qwen3Config, Qwen3RotaryEmbedding),
        "llama": (LlamaConfig, LlamaRotaryEmbedding),
    }[family]
    assert isinstance(target.config, config_class)
    positions = torch.tensor([[0, 1, 5, 200], [3, 17, 100, 255]])
    expected = reference(target.config)(torch.zeros(2, 4, 32), positions)
    for found, wanted in zip(model.rotary_emb(positions, torch.float32), expected):
        assert found.shape == (2, 1, 4, 16)
        torch.testing.assert_close(found[:, 0], wanted, rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True}),
        ("qwen2", {}),
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": dict(LLAMA3)}),
        ("mistral", {"sliding_window": None, "head_dim": 16}),
        ("gemma4", {}),
        ("gemma4-k-eq-v", {}),
    ],
    ids=str,
)
def test_layers_without_context_equal_those_of_the_family(family, settings):
    """A block alone, seen in both directions, goes through layers as transformers computes them."""
    if family.startswith("gemma4"):
        target = gemma4_target(family == "gemma4-k-eq-v", layer_types=["full_attention"] * 6)
    else:
        target = make_model(family, num_hidden_layers=4, **settings)
    model = drafter_for(target, num_hidden_layers=target.config.num_hidden_layers)
    decoder = copy.deepcopy(target.get_decoder())
    tensors = {n: t for n, t in model.state_dict().items() if n.startswith(("layers.", "norm."))}
    missing, unexpected = decoder.load_state_dict(tensors, strict=False)
    assert not unexpected and not [name for name in missing if name.startswith(("layers.", "norm."))]
    block, positions = torch.tensor([[5, 8, MASK, MASK]]), torch.arange(11, 15)[None]
    everything = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask = {"full_attention": everything} if family.startswith("gemma4") else everything
    embeddings = target.get_input_embeddings()(block)
    expected = decoder(
        inputs_embeds=embeddings, position_ids=positions, attention_mask=mask, use_cache=False
    ).last_hidden_state
    found = model(block, positions).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_positions_matter_by_their_difference_only(model):
    """Absolute positions of context and block, moved together, change nothing; the block alone does."""
    generator = torch.Generator().manual_seed(0)
    context = torch.randn(1, 6, 96, generator=generator)
    block = torch.tensor([[5, MASK, MASK, MASK]])

    @torch.no_grad()
    def states(context_start: int, block_start: int) -> torch.Tensor:
        context_ids = torch.arange(context_start, context_start + 6)[None]
        return model(block, torch.arange(block_start, block_start + 4)[None], context, context_ids).last_hidden_state

    torch.testing.assert_close(states(100, 106), states(0, 6), rtol=0, atol=1e-4)
    assert (states(0, 5) - states(0, 6)).abs().max() > 1e-3


@torch.no_grad()
def test_attention_without_a_mask_sees_later_slots(model):
    generator = torch.Generator().manual_seed(0)
    context, context_ids = torch.randn(1, 6, 96, generator=generator), torch.arange(6)[None]
    positions = torch.arange(6, 10)[None]
    first = model(torch.tensor([[5, MASK, MASK, 8]]), positions, context, context_ids).last_hidden_state
    second = model(torch.tensor([[5, MASK, MASK, 9]]), positions, context, context_ids).last_hidden_state
    assert (first[0, :3] - second[0, :3]).abs().amax(dim=-1).min() > 1e-4
    everything = torch.ones(1, 1, 4, 10, dtype=torch.bool)
    for mask in (everything, everything[:, :, :1]):
        masked = model(torch.tensor([[5, MASK, MASK, 8]]), positions, context, context_ids, mask).last_hidden_state
        torch.testing.assert_close(masked, first, rtol=0, atol=1e-5)


@torch.no_grad()
def test_masked_context_is_not_seen(model):
    """As in training, where a block sees the context before its anchor and itself."""
    context = torch.randn(1, 6, 96, generator=torch.Generator().manual_seed(0))
    block, positions, context_ids = torch.tensor([[5, MASK, MASK, MASK]]), torch.arange(3, 7)[None], torch.arange(6)
    short = model(block, positions, context[:, :3], context_ids[None, :3]).last_hidden_state
    allowed = torch.ones(1, 1, 4, 10, dtype=torch.bool)
    allowed[..., 3:6] = False
    for mask in (allowed, allowed[:, :, :1]):
        found = model(block, positions, context, context_ids[None], mask).last_hidden_state
        torch.testing.assert_close(found, short, rtol=0, atol=1e-5)


def naive_attention(query, key, value, mask, scale):
    """One head at a time, each query head with the key head of its group."""
    groups = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // groups].transpose(1, 2) * scale
        if mask is not None:
            allowed = mask[:, 0].expand_as(scores)
            scores = scores.masked_fill(~allowed, -torch.inf) if mask.dtype == torch.bool else scores + mask[:, 0]
        heads.append(scores.softmax(dim=-1) @ value[:, head // groups])
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize("kind", ["none", "shared", "own", "additive"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_grouped_attention_equals_a_naive_one(heads, kind):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, heads[0], 5, 8, generator=generator)
    key, value = (torch.randn(3, heads[1], 9, 8, generator=generator) for _ in range(2))
    allowed = torch.rand(3, 1, 5 if kind == "own" else 1, 9, generator=generator) < 0.6
    allowed[..., 0] = True
    mask = {"none": None, "additive": torch.zeros(allowed.shape).masked_fill(~allowed, -1e9)}.get(kind, allowed)
    found = attend(query, key, value, mask, scale=0.3)
    torch.testing.assert_close(found, naive_attention(query, key, value, mask, 0.3), rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma4", "gemma4-k-eq-v"])
def test_context_in_a_cache_equals_context_at_once(family):
    """Written in two pieces, as rounds do; the block leaves nothing behind."""
    model = drafter_for(target_of(family))
    width = len(model.config.target_layer_ids) * 32
    context = torch.randn(1, 7, width, generator=torch.Generator().manual_seed(0))
    block, positions = torch.tensor([[5, MASK, MASK, MASK]]), torch.arange(7, 11)[None]
    expected = model(block, positions, context, torch.arange(7)[None]).last_hidden_state
    cache, row = DSparkDrafter(model).make_cache(1), slice(0, 1)
    for start, end in ((0, 3), (3, 7)):
        count = torch.tensor([end - start])
        write = cache.begin(row, count, end - start, model.device)
        assert write.position_ids.tolist() == [list(range(start, end))]
        model.write_context(context[:, start:end], cache, write.position_ids)
        cache.advance(row, count)
        length = torch.tensor([4])
        write = cache.begin(row, length, 4, model.device)
        found = model(block, write.position_ids, cache=cache).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_gemma4_embeddings_are_scaled_masks_too():
    model = drafter_for(gemma4_target(True))
    embedded = model.embed(torch.tensor([5, MASK]))
    torch.testing.assert_close(embedded, model.embed_tokens.weight[[5, MASK]] * 32**0.5, rtol=1e-6, atol=1e-6)
    scale = torch.tensor(32**0.5).bfloat16()
    rounded = model.bfloat16().embed(torch.tensor([5]))
    assert torch.equal(rounded, model.embed_tokens.weight[[5]] * scale)


def test_left_padded_batches_of_a_new_drafter(target, model):
    batch = left_padded([3, 7, 5], vocab_size=60)
    plain = target.generate(**batch, max_new_tokens=12, do_sample=False)
    enabled = enable_speculation(copy.deepcopy(target))
    found = enabled.generate(**batch, assistant_model=model, max_new_tokens=12, do_sample=False)
    assert found.tolist() == plain.tolist()


def test_drafter_is_no_model_that_generates_alone(model):
    with pytest.raises(TypeError, match="cannot generate alone: give it to its target"):
        model.generate(IDS)
    assert not model.can_generate()


# Bad input: files


def edited(model: DSparkModel, folder: Path, changes: dict, layout: str = "released") -> Path:
    """A saved drafter with other keys in its config.json; `...` takes a key out."""
    model.save_pretrained(folder, layout=layout)
    contents = contents_of(folder) | changes
    contents = {name: value for name, value in contents.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(contents))
    return folder


def refuse(folder: Path, words: str) -> None:
    """Loading raises a ValueError in whole sentences."""
    with pytest.raises(ValueError, match=words) as caught:
        DSparkModel.from_pretrained(folder)
    assert str(caught.value).rstrip().endswith("."), "a sentence"


SCALING = {"factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {**SCALING, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
LAYERS = r"`target_layer_ids` has to hold strictly increasing layer numbers from -1"


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
    model = DSparkModel.from_target(target, MASK, rope_parameters=dict(DEFAULT), **SMALL)
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
def test_another_target_is_refused_by_both_doors(model, settings, words):
    other = make_model("qwen3", **{"num_hidden_layers": 4} | settings)
    call = {"assistant_model": model, "max_new_tokens": 6, "do_sample": False}
    expected = other.generate(IDS, max_new_tokens=6, do_sample=False)
    for door in (other, enable_speculation(copy.deepcopy(other))):
        with pytest.raises(ValueError, match=words):
            door.generate(IDS, **call)
        assert door.generate(IDS, max_new_tokens=6, do_sample=False).tolist() == expected.tolist()
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
        (ValueError, "`max_matching_ngram_size` is for prompt lookup", {"max_matching_ngram_size": 2}),
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
