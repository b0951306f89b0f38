"""Checkpoints from elsewhere: what is broken is refused by a sentence before anything is built, and no other file is
opened."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_specgen import DSparkConfig, DSparkModel
from hf_specgen.dspark import Calibration
from hf_specgen.dspark.calibration import CALIBRATION_FILE
from hf_specgen.dspark.checkpoint_files import read_headers
from tests.support.launching import LIMIT, ROOT, environment_of_a_script
from tests.support.models import make_model

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def model():
    target = make_model("qwen3", num_hidden_layers=4)
    return DSparkModel.from_target(target, 60, num_hidden_layers=1, block_size=4, markov_rank=4)


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


@pytest.fixture
def sharded(model, tmp_path):
    model.save_pretrained(tmp_path / "sharded", max_shard_size="4KB")
    return tmp_path / "sharded"


def refusal(folder: Path, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as caught:
        DSparkModel.from_pretrained(folder)
    sentence = str(caught.value)
    assert sentence.endswith("."), sentence
    return sentence


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensor(path: Path, name: str, change) -> None:
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})


# Sizes


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("vocab_size", 20_000_000, r"misshapen: embed_tokens.weight (64, 32) instead of (20000000, 32)"),
        ("intermediate_size", 10**9, "layers.0.mlp.up_proj.weight (64, 32) instead of (1000000000, 32)"),
        ("hidden_size", 10**9, "`hidden_size`"),
        ("markov_rank", 10**9, "markov_head.markov_w1.weight (64, 4) instead of (64, 1000000000)"),
        ("draft_vocab_size", 10**9, "`draft_vocab_size` has to be between 1 and the `vocab_size` of 64"),
        ("num_hidden_layers", 10**9, "`num_hidden_layers` has to be at most"),
        ("num_target_layers", 10**9, "`num_target_layers` has to be at most"),
        ("num_labels", 10**9, "`num_labels` has to be at most"),
        ("head_dim", 10**9, "`head_dim` has to be at most"),
        ("block_size", 10**9, "`block_size` has to be at most 64, but is 1000000000"),
        ("block_size", 64, "`block_size` has to give fewer than 64 candidates, but gives 64"),
        ("num_attention_heads", 2**62, "`num_attention_heads` has to be at most"),
        ("vocab_size", 2**80, "`vocab_size` has to be at most"),
    ],
)
@pytest.mark.parametrize("layout", ["released", "dspark", "speculators"])
def test_sizes_that_the_files_do_not_have_are_refused(model, tmp_path, monkeypatch, layout, field, value, words):
    model.save_pretrained(tmp_path, layout=layout)
    contents = json.loads((tmp_path / "config.json").read_text())
    layers = contents.get("transformer_layer_config", contents)
    layers[field] = contents[field] = value
    (tmp_path / "config.json").write_text(json.dumps(contents))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sentence = refusal(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024, "no more than 100 MB"
    if layout == "speculators" and field == "vocab_size" and "misshapen" in words:  # without tables of its own
        words = "markov_head.markov_w1.weight (64, 4) instead of (20000000, 4)"
    assert words in sentence


@pytest.mark.slow
def test_more_layers_than_the_file_has_are_refused(folder):
    edit(folder / "config.json", num_hidden_layers=1000, layer_types=["full_attention"] * 1000)
    sentence = refusal(folder)
    assert "missing: layers.1.input_layernorm.weight" in sentence and " more." in sentence and len(sentence) < 4000


def test_sizes_of_a_configuration_in_code_are_checked():
    for field, most in {"num_hidden_layers": 1024, "num_labels": 1024}.items():
        with pytest.raises(ValueError, match=f"`{field}` has to be at most {most}, but is 1000000000"):
            DSparkConfig(**{field: 10**9})


# Weights


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name", ["fc.weight", "layers.0.mlp.up_proj.weight", "confidence_head.proj.bias", "norm.weight"]
)
def test_weights_that_are_not_finite_are_refused(folder, name, number):
    edit_tensor(
        folder / WEIGHTS,
        name,
        lambda tensor: tensor.view(-1).index_fill(0, torch.tensor([0]), number).view(tensor.shape),
    )
    assert f"`{name}` of the checkpoint holds NaN or infinite numbers" in refusal(folder)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_weights_of_another_kind_are_refused(folder, dtype):
    edit_tensor(folder / WEIGHTS, "fc.weight", lambda tensor: tensor.to(dtype))
    assert f"`fc.weight` of `{folder / WEIGHTS}` has to hold fractions, but is of type" in refusal(folder)


def test_maps_of_a_reduced_vocabulary_of_another_kind_are_refused(tmp_path):
    target = make_model("qwen3", num_hidden_layers=4)
    model = DSparkModel.from_target(target, 60, num_hidden_layers=1, markov_rank=4, draft_vocab_size=16)
    model.save_pretrained(tmp_path)
    assert DSparkModel.from_pretrained(tmp_path).config.draft_vocab_size == 16
    edit_tensor(tmp_path / WEIGHTS, "d2t", lambda tensor: tensor.float())
    assert "`d2t` of" in refusal(tmp_path)


# Fields


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "1", None, [1]])
def test_rope_theta_is_checked(folder, value):
    edit(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": value})
    assert "rope_theta" in refusal(folder)


@pytest.mark.parametrize("value", [0, -1, True, "x"])
def test_rope_theta_of_older_files_is_checked(folder, value):
    edit(folder / "config.json", rope_theta=value)
    assert "`rope_theta` has to be a finite number above 0" in refusal(folder)


def test_rotary_parameters_that_leave_pairs_without_a_frequency_are_refused(folder):
    parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    edit(folder / "config.json", rope_parameters=parameters)
    assert "do not give a frequency for each pair of the `head_dim` of 8" in refusal(folder)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "file, field, inner",
    [
        ("config.json", "rms_norm_eps", "{}"),
        ("config.json", "rope_parameters.factor", '{"factor": %s}'),
        ("config.json", "eos_token_id.0", "[%s]"),
        ("generation_config.json", "assistant_confidence_threshold", "{}"),
        (CALIBRATION_FILE, "temperatures.0", "[%s]"),
    ],
)
def test_numbers_of_json_that_are_not_finite_are_named(folder, file, field, inner, text):
    path = folder / file
    contents = json.loads(path.read_text()) if path.exists() else {}
    contents[field.split(".")[0]] = "PLACE"
    value = inner % text if "%s" in inner else text
    path.write_text(json.dumps(contents).replace('"PLACE"', value))
    assert f"`{path}`: `{field}` has to be a finite number" in refusal(folder)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", CALIBRATION_FILE])
@pytest.mark.parametrize("text", ["[]", "7", "null", '"x"', "", "{", "[" * 100_000, "\x00"], ids=lambda text: text[:3])
def test_broken_json_is_named(folder, file, text):
    (folder / file).write_text(text)
    assert str(folder / file) in refusal(folder)


@pytest.mark.parametrize("value", [7, "load", "int8", [], "torch.nothing", "\ud800"])
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("layout", ["released", "dspark"])
def test_types_of_a_file_are_checked(model, tmp_path, layout, field, value):
    model.save_pretrained(tmp_path, layout=layout)
    edit(tmp_path / "config.json", **{field: value})
    assert f"`{field}` has to be the name of a floating-point type of torch" in refusal(tmp_path)


@pytest.mark.parametrize("field", ["hidden_act", "model_type", "markov_head_type"])
def test_lone_surrogates_are_shown_escaped(folder, field):
    edit(folder / "config.json", **{field: "\ud800"})
    sentence = refusal(folder)
    assert field in sentence and r"\ud800" in sentence
    sentence.encode()


# Which files are opened


def test_broken_safetensors_are_named(folder):
    path = folder / WEIGHTS
    whole = path.read_bytes()
    broken = [
        b"",
        b"x",
        whole[:-1],
        whole[:100],
        whole + b"x",
        b"\xff" * 100,
        (2**40).to_bytes(8, "little") + whole[8:],
    ]
    for data in broken:
        path.write_bytes(data)
        assert f"`{path}` has to be a safetensors file" in refusal(folder)


def test_folder_in_the_place_of_the_weights_is_refused(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    with pytest.raises(OSError, match=f"found in directory {folder}"):
        DSparkModel.from_pretrained(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../drafter/model.safetensors",
        "/etc/passwd",
        "model.bin",
        "part/model.safetensors",
        "..",
        "",
        "a\\b.safetensors",
    ]
    + ["\ud800.safetensors", "a\0.safetensors", 7, None, ["model.safetensors"]],
)
def test_index_names_plain_safetensors_only(folder, sharded, name):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][min(index["weight_map"])] = name
    (sharded / INDEX).write_text(json.dumps(index))
    assert f"`{sharded / INDEX}` has to name safetensors files in its own folder, but names" in refusal(sharded)


@pytest.mark.parametrize("text", ["[]", "null", "7", "{}", '{"weight_map": [], "metadata": {}}', '{"weight_map": {}}'])
def test_broken_index_is_named(sharded, text):
    (sharded / INDEX).write_text(text)
    assert str(sharded / INDEX) in refusal(sharded)


def test_index_and_files_have_to_agree(sharded):
    whole = json.loads((sharded / INDEX).read_text())
    first = "fc.weight"
    second = next(name for name, file in whole["weight_map"].items() if file != whole["weight_map"][first])
    for change in ({first: whole["weight_map"][second]}, {"layers.9.x": whole["weight_map"][first]}):
        (sharded / INDEX).write_text(json.dumps(whole | {"weight_map": whole["weight_map"] | change}))
        assert str(sharded / INDEX) in refusal(sharded)
    (sharded / INDEX).write_text(
        json.dumps(whole | {"weight_map": whole["weight_map"] | {first: "absent.safetensors"}})
    )
    assert "names 'absent.safetensors', but there is no such file" in refusal(sharded, OSError)


@pytest.mark.parametrize("file", [WEIGHTS, "config.json", "generation_config.json", CALIBRATION_FILE])
def test_links_out_of_the_folder_are_not_followed(folder, tmp_path, file):
    outside = tmp_path / "outside"
    path = folder / file
    outside.write_bytes(path.read_bytes() if path.exists() else b"{}")
    path.unlink(missing_ok=True)
    path.symlink_to(outside)
    assert f"`{path}` is a link to" in refusal(folder)


def test_links_of_a_shard_are_not_followed(sharded, tmp_path):
    path = sorted(sharded.glob("*.safetensors"))[0]
    path.rename(tmp_path / "outside.safetensors")
    path.symlink_to(os.path.relpath(tmp_path / "outside.safetensors", sharded))
    assert f"`{path}` is a link to" in refusal(sharded)


def test_links_within_the_folder_and_to_the_blobs_of_the_hub_are_followed(model, folder, tmp_path):
    (folder / WEIGHTS).rename(folder / "weights")
    (folder / WEIGHTS).symlink_to("weights")
    DSparkModel.from_pretrained(folder)
    snapshot, blobs = (
        tmp_path / "models--me--drafter" / "snapshots" / "abc",
        tmp_path / "models--me--drafter" / "blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    model.save_pretrained(tmp_path / "other")
    for path in (tmp_path / "other").iterdir():
        path.rename(blobs / f"hash-of-{path.stem}")
        (snapshot / path.name).symlink_to(f"../../blobs/hash-of-{path.stem}")
    DSparkModel.from_pretrained(snapshot)


def test_pickles_are_not_opened(folder):
    (folder / WEIGHTS).unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="model.safetensors"):
        DSparkModel.from_pretrained(folder)
    with pytest.raises(ValueError, match="`use_safetensors` is False"):
        DSparkModel.from_pretrained(folder, use_safetensors=False)


@pytest.mark.parametrize("field", ["transformers_weights", "quantization_config", "attn_implementation"])
def test_configuration_does_not_lead_elsewhere(model, tmp_path, field):
    model.save_pretrained(tmp_path, layout="dspark")
    edit(tmp_path / "config.json", **{field: "../other.safetensors"})
    assert f"`{field}` is not supported" in refusal(tmp_path)


def test_adapters_are_not_followed_to_their_base(folder):
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "/elsewhere", "peft_type": "LORA"})
    )
    assert "holds an adapter" in refusal(folder)


def test_headers_of_a_variant(model, tmp_path):
    model.save_pretrained(tmp_path, variant="half")
    assert read_headers(tmp_path, {}) is None
    assert read_headers(tmp_path, {}, "half").keys() == model.state_dict().keys()
    DSparkModel.from_pretrained(tmp_path, variant="half")


# Saving over an older checkpoint


FILES_WITH_SETTINGS = {"config.json", WEIGHTS, "generation_config.json", CALIBRATION_FILE}


class Interrupted(BaseException):
    """As Ctrl-C."""


def steps_of_saving(monkeypatch, end: int | None) -> list[str]:
    """Counts what saving does to files, and ends it before step `end`."""
    steps: list[str] = []

    def watched(name, function):
        def step(*args, **kwargs):
            if len(steps) == end:
                raise Interrupted
            steps.append(name)
            return function(*args, **kwargs)

        return step

    monkeypatch.setattr(os, "replace", watched("replace", os.replace))
    monkeypatch.setattr(Path, "unlink", watched("unlink", Path.unlink))
    return steps


def test_interrupted_saving_leaves_no_mixture(model, tmp_path, monkeypatch):
    old, new = (
        model,
        DSparkModel.from_target(
            make_model("qwen3", num_hidden_layers=4, seed=5), 60, num_hidden_layers=1, block_size=4, markov_rank=4
        ),
    )
    old.confidence_threshold, old.calibration = 0.25, Calibration((2.0,) * 4)
    loaded = {"old": 0, "new": 0, "refused": 0}
    try:
        for end in range(100):
            folder = tmp_path / str(end)
            old.save_pretrained(folder, max_shard_size="4KB")
            with monkeypatch.context() as patch:
                steps = steps_of_saving(patch, end)
                try:
                    new.save_pretrained(folder)
                except Interrupted:
                    pass
            try:
                found = DSparkModel.from_pretrained(folder)
            except (OSError, ValueError):
                loaded["refused"] += 1
            else:
                which = "old" if torch.equal(found.fc.weight, old.fc.weight) else "new"
                expected = old if which == "old" else new
                loaded[which] += 1
                assert found.confidence_threshold == expected.confidence_threshold
                assert found.calibration == expected.calibration
                for name, tensor in expected.state_dict().items():
                    assert torch.equal(found.state_dict()[name], tensor), name
            if len(steps) < end:
                break
    finally:
        old.confidence_threshold, old.calibration = 0.0, None
    assert loaded["old"] > 0 and loaded["new"] > 0 and loaded["refused"] > 0 and end > 5
    assert {path.name for path in folder.iterdir()} == {"config.json", WEIGHTS}, "nothing of the older one is left"


def test_failed_saving_leaves_the_older_checkpoint(model, folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(DSparkModel, "_generation_settings", lambda self: {"num_assistant_tokens": object()})
    with pytest.raises(TypeError):
        model.save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_calibration_is_replaced_whole(tmp_path, monkeypatch):
    Calibration((1.0, 2.0)).save(tmp_path)

    def fail(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        Calibration((3.0, 4.0)).save(tmp_path)
    assert Calibration.load(tmp_path).temperatures == (1.0, 2.0)
    assert [path.name for path in tmp_path.iterdir()] == [CALIBRATION_FILE]


# In random ways


@pytest.mark.slow
def test_checkpoints_broken_at_random_are_refused_in_sentences(tmp_path):
    command = [sys.executable, "-m", "tests.support.broken_checkpoints", str(tmp_path), "150", "7"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment_of_a_script(), timeout=LIMIT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    assert report["offences"] == []
    assert report["refused"] > 75 and report["megabytes"] < 1024
