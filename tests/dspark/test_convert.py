import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_specgen import DSparkConfig, DSparkModel
from hf_specgen.dspark import Calibration, convert
from hf_specgen.dspark.layouts import LAYOUTS
from tests.support.models import make_model

SMALL = {"num_hidden_layers": 2, "block_size": 4, "markov_rank": 4}
MASK, TABLES = 60, {"embed_tokens.weight", "lm_head.weight"}


@pytest.fixture(scope="module")
def target():
    return make_model("qwen3", num_hidden_layers=4)


@pytest.fixture(scope="module")
def sources(target, tmp_path_factory) -> dict[str, Path]:
    """One drafter in every layout."""
    folder = tmp_path_factory.mktemp("sources")
    torch.manual_seed(0)
    model = DSparkModel.from_target(target, MASK, **SMALL)
    for layout in LAYOUTS:
        model.save_pretrained(folder / layout, layout=layout)
    return {layout: folder / layout for layout in LAYOUTS}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def contents_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def assert_same_fields(found: Path, expected: Path) -> None:
    """Apart from what the file says beyond the drafter's fields, and the depth, which speculators does not write."""
    others = {"published_config", "num_target_layers", "architectures", "transformers_version"}
    names = set(DSparkConfig.__dataclass_fields__) - others
    first, second = DSparkConfig.from_pretrained(found), DSparkConfig.from_pretrained(expected)
    assert {n: getattr(first, n) for n in names} == {n: getattr(second, n) for n in names}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_becomes_every_other_with_the_target(sources, target, tmp_path, source, layout):
    convert(sources[source], tmp_path, layout, target)
    expected = tensors_of(sources["released"])
    if layout == "speculators" or (source == "speculators" and layout == "dspark"):
        expected = {name: tensor for name, tensor in expected.items() if name not in TABLES}
    assert_same_tensors(tensors_of(tmp_path), expected)
    assert_same_fields(tmp_path, sources["released"])
    kind = {"released": "qwen3", "dspark": "dspark", "speculators": None}[layout]
    assert contents_of(tmp_path).get("model_type") == kind
    assert_same_tensors(
        DSparkModel.from_pretrained(tmp_path).share_weights(target).state_dict(), tensors_of(sources["released"])
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_without_the_target(sources, target, tmp_path, source, layout):
    if source == "speculators" and layout == "released":
        with pytest.raises(ValueError, match=r"holds embedding and head, which this drafter takes from its target"):
            convert(sources[source], tmp_path, layout)
        assert not list(tmp_path.iterdir())
        return
    convert(sources[source], tmp_path, layout)
    assert_same_fields(tmp_path, sources["released"])
    whole = DSparkModel.from_pretrained(tmp_path).share_weights(target)
    assert_same_tensors(whole.state_dict(), tensors_of(sources["released"]))


@pytest.mark.parametrize("source", LAYOUTS)
def test_there_and_back_changes_nothing(sources, target, tmp_path, source):
    for layout in LAYOUTS:
        convert(sources[source], tmp_path / layout, layout, target)
        convert(tmp_path / layout, tmp_path / f"{layout}-back", source, target)
        found, expected = tensors_of(tmp_path / f"{layout}-back"), tensors_of(sources[source])
        if layout == "speculators" and source == "dspark":  # may leave the tables to the target
            expected = {name: tensor for name, tensor in expected.items() if name not in TABLES}
        assert_same_tensors(found, expected)
        assert_same_fields(tmp_path / f"{layout}-back", sources[source])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_keep_their_type(target, tmp_path, layout):
    narrow = copy.deepcopy(target).bfloat16()
    DSparkModel.from_target(narrow, MASK, **SMALL).save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "destination", layout, narrow)
    found = tensors_of(tmp_path / "destination")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert "bfloat16" in json.dumps(contents_of(tmp_path / "destination"))
    for name, tensor in tensors_of(tmp_path / "source").items():
        assert name not in found or torch.equal(found[name], tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reduced_vocabulary(target, tmp_path, layout):
    torch.manual_seed(0)
    model = DSparkModel.from_target(target, MASK, draft_vocab_size=10, **SMALL)
    model.d2t.copy_(torch.arange(10) * 2)
    model.t2d.zero_()
    model.t2d[torch.arange(10) * 3] = True
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "destination", layout)
    found = tensors_of(tmp_path / "destination")
    assert ("embed_tokens.weight" in found) == (layout != "speculators")
    assert {"lm_head.weight", "d2t", "t2d"} <= found.keys()
    whole = DSparkModel.from_pretrained(tmp_path / "destination").share_weights(target)
    assert_same_tensors(whole.state_dict(), model.state_dict())


def test_dflash_of_zlab_keeps_its_layout_of_slots(target, tmp_path):
    torch.manual_seed(0)
    settings = {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False}
    model = DSparkModel.from_target(target, MASK, **SMALL | settings)
    model.save_pretrained(tmp_path / "source")
    contents = contents_of(tmp_path / "source")
    names = ("mask_token_id", "target_layer_ids")
    nested = {name: contents.pop(name) for name in names}
    flat = {name: contents[name] for name in contents if name not in ("sample_from_anchor", "markov_rank")}
    zlab = {**flat, "architectures": ["DFlashDraftModel"], "dflash_config": nested}
    (tmp_path / "source" / "config.json").write_text(json.dumps(zlab))
    tensors = tensors_of(tmp_path / "source")
    kept = {name: tensor for name, tensor in tensors.items() if name not in TABLES}
    save_file(kept, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    for layout in LAYOUTS:
        convert(tmp_path / "source", tmp_path / layout, layout, target)
        again = DSparkModel.from_pretrained(tmp_path / layout)
        assert not again.config.sample_from_anchor and again.config.num_candidates == 3
        assert again.config.mask_token_id == MASK and again.config.target_layer_ids == [0, 1, 2]
        assert (again.embed_tokens is not None) == (layout == "released")


def test_threshold_and_calibration_come_along(sources, target, tmp_path):
    model = DSparkModel.from_pretrained(sources["released"])
    model.confidence_threshold = 0.25
    model.calibration = Calibration((1.0, 1.5, 2.0, 0.5))
    model.save_pretrained(tmp_path / "source")
    for layout in LAYOUTS:
        convert(tmp_path / "source", tmp_path / layout, layout)
        again = DSparkModel.from_pretrained(tmp_path / layout)
        assert again.confidence_threshold == 0.25 and again.calibration == model.calibration


def test_own_tables_are_kept_beside_a_target_that_differs(sources, tmp_path):
    other = make_model("qwen3", seed=5, num_hidden_layers=4)
    convert(sources["released"], tmp_path, "released", other)
    assert_same_tensors(tensors_of(tmp_path), tensors_of(sources["released"]))


def test_own_tables_that_speculators_cannot_hold_are_not_lost(sources, tmp_path):
    other = make_model("qwen3", seed=5, num_hidden_layers=4)
    with pytest.raises(ValueError, match="embed_tokens|lm_head"):
        convert(sources["released"], tmp_path, "speculators", other)


def test_unknown_layout_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match=r"`layout` has to be one of \('released', .* but is 'gguf'"):
        convert(tmp_path / "not there", tmp_path, "gguf")


def test_target_that_does_not_fit_is_refused(sources, tmp_path):
    with pytest.raises(ValueError, match="hidden size of 32, but .* has 16: it belongs to another target"):
        convert(sources["speculators"], tmp_path, "released", make_model("qwen3", num_hidden_layers=4, hidden_size=16))
    assert not list(tmp_path.iterdir())


def test_layers_that_a_layout_cannot_express_are_refused(tmp_path):
    model = DSparkModel.from_target(make_model("gemma2"), MASK, **SMALL)
    model.save_pretrained(tmp_path / "source", layout="dspark")
    for layout in ("released", "speculators"):
        with pytest.raises(ValueError, match="No published layout knows layers like these"):
            convert(tmp_path / "source", tmp_path / layout, layout)


def test_what_is_no_drafter_is_refused(target, tmp_path):
    target.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM.*not that of a DSpark or DFlash drafter"):
        convert(tmp_path, tmp_path / "destination")
    with pytest.raises(OSError):
        convert(tmp_path / "nothing", tmp_path / "destination")
