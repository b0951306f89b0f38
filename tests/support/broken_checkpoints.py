"""Breaks a drafter's checkpoint in random ways, loads it, and reports what is wrong with how it is refused.

    python -m tests.support.broken_checkpoints FOLDER NUMBER SEED

Prints one JSON object: how many were refused and how many loaded, the offences, the most seconds of one load, and the
peak of the process's memory in MB.
"""

import json
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from hf_specgen import DSparkModel
from hf_specgen.dspark import Calibration
from hf_specgen.dspark.layouts import LAYOUTS
from tests.support.models import make_model

VALUES = [None, True, False, -1, 0, 1, 3, 63, 2.5, -0.5, 10**6, 10**9, 2**31 - 1, 2**63, 10**30]
VALUES += [float("nan"), float("inf"), "", "x", "\ud800", "7", [], {}, [1], ["x"], [None], {"a": 1}, [0] * 5000]
FIELDS = ["num_labels", "id2label", "dtype", "torch_dtype", "rope_theta", "rope_parameters", "block_size", "head_dim"]
FIELDS += ["vocab_size", "draft_vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "markov_rank"]
TEXTS = [
    "",
    "{",
    "[]",
    "7",
    "null",
    '"x"',
    "[" * 5000,
    "{}",
    '{"a": NaN}',
    "\x00",
    '{"weight_map": [], "metadata": {}}',
]
NAMES = [
    "../x.safetensors",
    "/etc/passwd",
    "x.bin",
    "a/b.safetensors",
    "absent.safetensors",
    "",
    "\ud800.safetensors",
    7,
]


def main() -> None:
    folder, number, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    whole = [save_whole(folder / layout / size, layout, size) for layout in LAYOUTS for size in ("1GB", "4KB")]
    report = {"refused": 0, "loaded": 0, "offences": [], "seconds": 0.0}
    for index in range(number):
        rng = random.Random(f"{seed}.{index}")
        broken = folder / "broken"
        shutil.copytree(rng.choice(whole), broken)
        what = rng.choice(WAYS)(broken, rng)
        start = time.perf_counter()
        offence = load(broken, report)
        report["seconds"] = max(report["seconds"], round(time.perf_counter() - start, 2))
        if offence is not None:
            report["offences"].append(f"{index}: {what[:200]}: {offence[:400]}")
        shutil.rmtree(broken)
    report["megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(report))


def save_whole(folder: Path, layout: str, size: str) -> Path:
    target = make_model("qwen3", num_hidden_layers=4)
    model = DSparkModel.from_target(target, 60, num_hidden_layers=1, block_size=4, markov_rank=4)
    model.confidence_threshold = 0.25
    model.calibration = Calibration((1.5,) * 4)
    model.save_pretrained(folder, layout=layout, max_shard_size=size)
    return folder


def load(folder: Path, report: dict) -> str | None:
    """What is wrong with how a broken checkpoint is refused, or with what was loaded."""
    try:
        model = DSparkModel.from_pretrained(folder)
    except (ValueError, TypeError, OSError) as error:
        report["refused"] += 1
        sentence = str(error).rstrip()
        names_it = "`" in sentence or folder.name in sentence or "tensors of its configuration" in sentence
        return None if sentence.endswith(".") and names_it else f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    report["loaded"] += 1
    is_finite = all(bool(p.isfinite().all()) and p.is_floating_point() for p in model.parameters())
    is_small = model.config.block_size < 64 and 0 <= model.confidence_threshold <= 1
    return None if is_finite and is_small else "loads"


def break_field(folder: Path, rng: random.Random) -> str:
    path = folder / "config.json"
    contents = json.loads(path.read_text())
    inner = contents.get("transformer_layer_config", contents) if rng.random() < 0.5 else contents
    name, value = rng.choice([*inner, *FIELDS]), rng.choice(VALUES)
    inner[name] = value
    path.write_text(json.dumps(contents))
    return f"{name} = {value!r}"


def break_rope(folder: Path, rng: random.Random) -> str:
    path = folder / "config.json"
    contents = json.loads(path.read_text())
    inner = contents.get("transformer_layer_config", contents)
    name = rng.choice(["rope_theta", "rope_type", "factor", "partial_rotary_factor"])
    inner["rope_parameters"] = {**inner["rope_parameters"], name: rng.choice([*VALUES, "linear", "yarn", "llama3"])}
    path.write_text(json.dumps(contents))
    return f"rope_parameters = {inner['rope_parameters']}"


def break_text(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.glob("*.json")))
    text, kind = path.read_text(), rng.randrange(3)
    if kind == 0:
        text = rng.choice(TEXTS)
    elif kind == 1:
        text = text[: rng.randrange(len(text))]
    else:
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice('{}[]",:09-e\\') + text[place + 1 :]
    path.write_text(text)
    return f"{path.name}: {text[:40]!r}"


def break_settings(folder: Path, rng: random.Random) -> str:
    name, keys = rng.choice(
        [
            ("generation_config.json", ["assistant_confidence_threshold", "num_assistant_tokens"]),
            ("confidence_calibration.json", ["temperatures", "ece_before", "dataset", "num_samples", "decoding"]),
        ]
    )
    contents = json.loads((folder / name).read_text())
    contents[key := rng.choice(keys)] = rng.choice([*VALUES, [float("nan")] * 4, [0.0] * 4, ["1"] * 4, [1.0] * 5])
    (folder / name).write_text(json.dumps(contents))
    return f"{name}: {key} = {contents[key]!r}"


def break_bytes(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    data, kind = bytearray(path.read_bytes()), rng.randrange(4)
    if kind == 0:
        del data[rng.randrange(len(data)) :]
    elif kind == 1:
        data[:8] = rng.choice([0, 7, len(data), 2**40, 2**63, 2**64 - 1]).to_bytes(8, "little")
    elif kind == 2:
        data[8 + rng.randrange(60)] = rng.randrange(256)
    else:
        data += b"x" * rng.randrange(1, 9)
    path.write_bytes(data)
    return f"{path.name}: bytes {kind}"


def break_tensor(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    tensors = load_file(path)
    name = rng.choice(sorted(tensors))
    tensor, kind = tensors[name].float(), rng.randrange(6)
    if kind == 0:
        tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice([float("nan"), float("inf"), -float("inf")])
    elif kind == 1:
        tensor = tensor.to(rng.choice([torch.int8, torch.bool, torch.int64, torch.uint8, torch.complex64]))
    elif kind == 2:
        tensor = tensor[..., :-1].clone()
    elif kind == 3:
        tensor = tensor[None].clone()
    elif kind == 4:
        tensors["extra.weight"] = torch.zeros(2)
    del tensors[name]
    if kind != 5:
        tensors[name] = tensor.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    return f"{path.name}: {name} {kind}"


def break_index(folder: Path, rng: random.Random) -> str:
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return break_link(folder, rng)
    index = json.loads(path.read_text())
    name = rng.choice(sorted(index["weight_map"]))
    index["weight_map"][name] = rng.choice(NAMES)
    if rng.random() < 0.2:
        index["metadata"] = rng.choice(VALUES)
    path.write_text(json.dumps(index))
    return f"index: {name} -> {index['weight_map'][name]!r}"


def break_link(folder: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(folder.glob("*.safetensors")) + [folder / "config.json"])
    path.unlink()
    outside = folder.parent / f"outside-{path.name}"
    kind = rng.randrange(3)
    if kind == 0:
        outside.write_bytes(b"{}")
        path.symlink_to(outside)
    elif kind == 1:
        path.mkdir()
    return f"{path.name}: {('link', 'folder', 'absent')[kind]}"


WAYS: list[Callable[[Path, random.Random], str]] = [
    break_field,
    break_field,
    break_rope,
    break_text,
    break_settings,
    break_bytes,
    break_tensor,
    break_tensor,
    break_index,
    break_link,
]

if __name__ == "__main__":
    main()
