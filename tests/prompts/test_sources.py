import ast
from collections import Counter

import pytest

from hf_specgen.prompts import load_prompts

CATEGORIES = ["chat", "summarisation", "code_editing", "arithmetic"]


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
