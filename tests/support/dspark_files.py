"""Checkpoints of drafters, changed on disk."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_specgen import DSparkModel

SCALING = {"factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {**SCALING, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
LAYERS = r"`target_layer_ids` has to hold strictly increasing layer numbers from -1"


def assert_equal_tensors(actual: DSparkModel, expected: DSparkModel) -> None:
    found, wanted = actual.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def contents_of(folder) -> dict:
    return json.loads((Path(folder) / "config.json").read_text())


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


def rewritten(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def drop(tensors: dict, prefix: str) -> None:
    for name in [name for name in tensors if name.startswith(prefix)]:
        del tensors[name]
