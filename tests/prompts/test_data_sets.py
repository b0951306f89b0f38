import sys

import pytest

from hf_specgen.prompts import Prompt, load_prompts
from tests.support.data_files import write_lines


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "own_data_set"
    folder.mkdir()
    return folder


def test_data_set_with_and_without_a_column(folder):
    row = {"question": "How many?", "prompt": "Say it.", "category": "arithmetic"}
    write_lines(folder / "train.jsonl", dict.fromkeys(row, "wrong split"))
    write_lines(folder / "test.jsonl", row)
    assert load_prompts(f"{folder}:question") == [Prompt("arithmetic", ("How many?",))]
    assert load_prompts(str(folder)) == [Prompt("arithmetic", ("Say it.",))]
    with pytest.raises(ValueError, match="`answer` is needed, but there are only"):
        load_prompts(f"{folder}:answer")


def test_data_set_with_lists_of_turns(folder):
    write_lines(folder / "train.jsonl", {"turns": ["one", "two"]})
    assert load_prompts(str(folder)) == [Prompt(str(folder), ("one", "two"))]


def test_data_set_that_cannot_be_built_is_refused(folder):
    write_lines(folder / "train.jsonl", {"prompt": "a"})
    write_lines(folder / "test.jsonl", {"other": 1})
    with pytest.raises(ValueError, match="data set that `datasets` can load"):
        load_prompts(str(folder))


def test_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install hf-specgen\[commands\]"):
        load_prompts("openai/gsm8k/main:question")
    assert len(load_prompts()) == 40
