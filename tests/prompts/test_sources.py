import ast
import json
from collections import Counter

import pytest

from hf_specgen.prompts.sources import Prompt, load_prompts

CATEGORIES = ["chat", "summarisation", "code_editing", "arithmetic"]


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_builtin_set_has_ten_of_each_kind_and_no_duplicates():
    prompts = load_prompts()
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(CATEGORIES, 10)
    assert len({prompt.turns for prompt in prompts}) == 40
    assert all(len(prompt.turns) == 1 for prompt in prompts)


def test_builtin_summaries_come_with_a_source_text():
    for prompt in load_prompts(categories=["summarisation"]):
        instruction, text = prompt.turns[0].split("\n\n")
        assert instruction.endswith(".") and 120 <= len(text.split()) <= 200


def test_builtin_code_is_valid_python():
    for prompt in load_prompts(categories=["code_editing"]):
        code = prompt.turns[0].split("```python\n")[1].removesuffix("\n```")
        (function,) = ast.parse(code).body
        assert isinstance(function, ast.FunctionDef) and 10 <= len(code.splitlines()) <= 25


def test_limit_counts_after_the_categories():
    assert [prompt.category for prompt in load_prompts(limit=4)] == CATEGORIES
    some = load_prompts(categories=["arithmetic", "chat"], limit=3)
    assert [prompt.category for prompt in some] == ["chat", "arithmetic", "chat"]


def test_jsonl_with_turns_or_prompt(tmp_path):
    path = write_lines(
        tmp_path / "own.jsonl",
        {"category": "chat", "turns": ["first", "second"]},
        {"prompt": "line separators\u2028inside count as text"},
    )
    assert load_prompts(path) == [
        Prompt("chat", ("first", "second")),
        Prompt(path, ("line separators\u2028inside count as text",)),
    ]


def test_blank_lines_and_unescaped_line_separators_are_no_rows(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('\n{"prompt": "a\u2028b"}\n\n', encoding="utf-8")
    assert [prompt.turns for prompt in load_prompts(str(path))] == [("a\u2028b",)]


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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no json", "line 1: .*not JSON"),
        ("[1]", "line 1: every line has to be a JSON object"),
        ('{"text": "x"}', "line 1: a field `turns` or `prompt` is needed"),
        ('{"turns": []}', "line 1: `turns` has to be"),
        ('{"turns": ["a", 3]}', "line 1: `turns` has to be"),
        ('{"prompt": "  "}', "line 1: `prompt` has to be"),
        ('{"prompt": null}', "line 1: `prompt` has to be"),
        ("", "at least one prompt"),
    ],
)
def test_bad_files_are_refused_with_the_line(tmp_path, line, message):
    path = tmp_path / "own.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="`limit` has to be at least 1, but is 0"):
        load_prompts(limit=0)
    with pytest.raises(ValueError, match="arithmetic.*summarisation.*but is \\['poetry'\\]"):
        load_prompts(categories=["poetry"])
    with pytest.raises(ValueError, match="but is \\[\\]"):
        load_prompts(categories=[])
    with pytest.raises(ValueError, match="the string 'chat'"):
        load_prompts(categories="chat")
    with pytest.raises(ValueError, match="has to be a readable text file"):
        load_prompts("no_such_file.jsonl")
    with pytest.raises(ValueError, match="data set that `datasets` can load"):
        load_prompts("./no_such_folder/of_data")
