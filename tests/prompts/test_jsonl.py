import pytest

from hf_specgen.prompts import Prompt, load_prompts
from tests.support.data_files import write_lines


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
