"""The files of a checkpoint, read before anything is built: each error names the file. Knows no models.

A folder from elsewhere is not trusted: its index names plain files inside it, and only safetensors are opened.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ..arguments import shown

MOST_BYTES = 2**24  # of a JSON file
HUB_KWARGS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


@dataclass(frozen=True)
class TensorHeader:
    """What a file says of a tensor: its shape, its type in safetensors' words, and where it is."""

    shape: tuple[int, ...]
    dtype: str
    file: str


def found_file(folder: str | os.PathLike, name: str, hub_kwargs: dict[str, Any]) -> str | None:
    """The path of a checkpoint's file, from the hub's cache if `folder` is a name there; None if there is none."""
    path = cached_file(
        folder,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
        **hub_kwargs,
    )
    if path is not None and os.path.isdir(folder):
        _check_inside(path, Path(folder))
    return path


def _check_inside(path: str, folder: Path) -> None:
    """Refuses a link that leaves the folder, but for those of the hub's cache, whose files are links to its blobs."""
    roots = [folder.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parents[1] / "blobs")
    resolved = Path(path).resolve()
    if not any(resolved.is_relative_to(root) for root in roots):
        raise ValueError(f"`{path}` is a link to {shown(str(resolved))}, outside of its folder: copy the file there.")


def read_json_object(path: str | os.PathLike) -> dict[str, Any]:
    """
    The JSON object of a file.

    Raises:
        `ValueError`: if the file is not readable as one, or a number in it is not finite.
    """
    try:
        if (size := os.path.getsize(path)) > MOST_BYTES:
            raise ValueError(f"{size} bytes are too many")
        contents = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"`{path}` has to be a readable JSON file, but is not: {error}.") from error
    if not isinstance(contents, dict):
        raise ValueError(f"`{path}` has to hold a JSON object, but holds {shown(contents)}.")
    for name, value in _numbers(contents, ""):
        if not math.isfinite(value):
            raise ValueError(f"`{path}`: `{name}` has to be a finite number, but is {value}.")
    return contents


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """The fractions in a JSON value with their names, such as `rope_parameters.rope_theta`."""
    if isinstance(value, float):
        yield name, value
    elif isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _numbers(item, f"{name}.{key}" if name else str(key))


def write_text(path: Path, text: str) -> None:
    """Writes a file beside its place and moves it there, so that it is never there in half."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_headers(
    folder: str | os.PathLike, hub_kwargs: dict[str, Any], variant: str | None = None
) -> dict[str, TensorHeader] | None:
    """
    The headers of a checkpoint's tensors by name; None if it has no safetensors.

    Raises:
        `ValueError`: if a file is broken, the index names what is no plain safetensors file of the folder, or the
            files do not hold what it says.
        `OSError`: if a file that the index names is missing.
    """
    path = found_file(folder, _with_variant(SAFE_WEIGHTS_NAME, variant), hub_kwargs)
    if path is not None:
        return _headers_of_file(path)
    index_path = found_file(folder, _with_variant(SAFE_WEIGHTS_INDEX_NAME, variant), hub_kwargs)
    if index_path is None:
        return None
    weight_map = _read_index(index_path)
    headers: dict[str, TensorHeader] = {}
    for name in sorted(set(weight_map.values())):
        path = found_file(folder, name, hub_kwargs)
        if path is None:
            raise OSError(f"`{index_path}` names {shown(name)}, but there is no such file.")
        for tensor_name, header in _headers_of_file(path).items():
            if weight_map.get(tensor_name) != name:
                raise ValueError(f"`{path}` holds {shown(tensor_name)}, which `{index_path}` does not say.")
            headers[tensor_name] = header
    if absent := weight_map.keys() - headers.keys():
        raise ValueError(f"`{index_path}` names {shown(min(absent))}, but the file does not hold it.")
    return headers


def _with_variant(name: str, variant: str | None) -> str:
    """`model.safetensors` of variant `fp16` is `model.fp16.safetensors`, and its index likewise."""
    stem, rest = name.split(".", 1)
    return name if variant is None else f"{stem}.{variant}.{rest}"


def _read_index(path: str) -> dict[str, str]:
    index = read_json_object(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not isinstance(index.get("metadata"), dict):
        raise ValueError(f"`{path}` has to hold the objects `weight_map` and `metadata`, but does not.")
    for name in weight_map.values():
        if not isinstance(name, str) or not _is_plain(name):
            raise ValueError(f"`{path}` has to name safetensors files in its own folder, but names {shown(name)}.")
    return weight_map


def _is_plain(name: str) -> bool:
    return name.endswith(".safetensors") and name.isprintable() and not set(name) & {"/", "\\", ":"}


def _headers_of_file(path: str) -> dict[str, TensorHeader]:
    headers = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                tensor = file.get_slice(name)
                headers[name] = TensorHeader(tuple(tensor.get_shape()), tensor.get_dtype(), path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"`{path}` has to be a safetensors file, but cannot be read as one: {error}.") from error
    return headers
