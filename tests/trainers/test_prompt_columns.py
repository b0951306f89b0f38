import json

import pytest
from datasets import Dataset

from tests.support.data_sets import ANSWER, CHAT, rows, stream, table
from trainers.eval_prompts import EvalPrompts

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "Where."}}},
    },
}


@pytest.mark.parametrize(
    "columns", [{"prompt": ["a"], "completion": ["A"]}, {"question": ["a"], "answer": ["A"]}], ids=["trl", "gsm8k"]
)
def test_usual_columns_are_found(columns):
    assert EvalPrompts.of(table(**columns, other=[1])) == EvalPrompts(("a",), ("A",))


def test_prompts_without_completions_have_no_references():
    assert EvalPrompts.of(table(prompt=["a"], text=["b"])) == EvalPrompts(("a",), None)


def test_named_columns_win_over_usual_ones():
    dataset = table(prompt=["p"], completion=["c"], instruction=["i"], output=["o"])
    assert EvalPrompts.of(dataset, prompt_column="instruction", completion_column="output") == EvalPrompts(
        ("i",), ("o",)
    )


def test_the_last_answer_of_the_assistant_is_the_reference():
    first = [*CHAT, {"role": "assistant", "content": "early"}, {"role": "user", "content": "more"}]
    dataset = rows({"messages": [*first, ANSWER]}, {"messages": [*CHAT, ANSWER, {"role": "user", "content": "bye"}]})
    prompts = EvalPrompts.of(dataset)
    assert prompts.prompts == (first, CHAT)
    assert prompts.references == ("hello", "hello")


def test_keys_that_only_other_messages_have_are_gone():
    call = {"role": "user", "content": "hi", "name": "Ann"}
    dataset = rows({"chat": [*CHAT, ANSWER]}, {"chat": [call, ANSWER]})  # the table gives all messages a `name`
    assert EvalPrompts.of(dataset, messages_column="chat").prompts == (CHAT, [call])


def test_prompt_and_completion_may_be_messages():
    dataset = rows({"prompt": CHAT, "completion": [ANSWER]})
    assert EvalPrompts.of(dataset) == EvalPrompts((CHAT,), ("hello",))


def test_conversations_without_an_answer_are_prompts():
    assert EvalPrompts.of(rows({"messages": CHAT}), prompt_column="messages") == EvalPrompts((CHAT,), None)


def test_a_prompt_out_of_a_text_holds_nothing_of_its_completion():
    texts = ["Q: 1+1 A: 2", "Q: A? A: B A: C"]
    prompts = EvalPrompts.of(table(text=texts), split_marker=" A:")
    assert prompts.prompts == ("Q: 1+1 A:", "Q: A? A:")
    assert prompts.references == (" 2", " B A: C")
    assert [a + b for a, b in zip(prompts.prompts, prompts.references)] == texts
    named = table(text=["no"], doc=["a=b"])
    assert EvalPrompts.of(named, text_column="doc", split_marker="=") == EvalPrompts(("a=",), ("b",))


@pytest.mark.parametrize(
    "columns, sentence",
    [
        (
            {"prompt_column": "x"},
            r"`prompt_column` has to be a column of the data set, but 'x' is none of \['q', 'a'\]",
        ),
        ({"prompt_column": "q", "completion_column": "x"}, r"`completion_column` .* 'x' is none of \['q', 'a'\]"),
        ({"messages_column": "x"}, r"`messages_column` .* 'x' is none of \['q', 'a'\]"),
        ({"split_marker": "="}, r"`text_column` .* 'text' is none of \['q', 'a'\]"),
        ({}, r"none of \['prompt', 'question', 'messages'\] is among \['q', 'a'\]"),
        ({"completion_column": "a"}, r"No column of prompts was found"),
        ({"text_column": "q"}, "`text_column` needs `split_marker`"),
        ({"prompt_column": "q", "messages_column": "a"}, "`prompt_column` and `messages_column` are two ways"),
        ({"completion_column": "a", "split_marker": "="}, "`completion_column` and `split_marker` are two ways"),
    ],
)
def test_columns_that_cannot_be_read(columns, sentence):
    with pytest.raises(ValueError, match=sentence):
        EvalPrompts.of(table(q=["a"], a=["A"]), **columns)


def test_settings_that_do_not_exist():
    with pytest.raises(TypeError, match="`promt_column` is an unknown argument. Did you mean `prompt_column`?"):
        EvalPrompts.of(table(prompt=["a"]), promt_column="prompt")
    with pytest.raises(TypeError, match="`split_marker` has to be a text that is not empty, but is ''"):
        EvalPrompts.of(table(text=["a"]), split_marker="")
    with pytest.raises(ValueError, match="`prompt_column` is for a data set, but `prompts` is a list"):
        EvalPrompts.of(["a"], prompt_column="q")


@pytest.mark.parametrize(
    "dataset, columns, sentence",
    [
        (table(text=["a=b", "ab"]), {"split_marker": "="}, "Row 1 has to hold the `split_marker` '=', but is 'ab'"),
        (table(text=[5]), {"split_marker": "="}, "Row 0 has to hold a text, but holds 5"),
        (table(prompt=["a", None]), {}, "Row 1 has nothing in the column 'prompt'"),
        (table(prompt=["a"], answer=[None]), {}, "Row 0 has nothing in the column 'answer'"),
        (rows({"messages": CHAT}), {}, r"Row 0 has to hold an answer of the assistant .*roles are \['user'\]"),
        (rows({"messages": [ANSWER]}), {}, r"Row 0 .* after something else"),
        (table(messages=["hi"]), {}, "Row 0 has to hold a list of messages"),
        (
            rows({"messages": [*CHAT, {"role": "assistant", "content": None}]}),
            {},
            "answer of row 0 has to have a text or",
        ),
        (
            rows({"prompt": "a", "completion": [ANSWER, ANSWER]}),
            {},
            "reference of row 0 has to be one message",
        ),
        (table(prompt=[5]), {}, "number 0 is 5"),
        (stream(text=["no marker"]), {"split_marker": "="}, "Row 0 has to hold the `split_marker`"),
    ],
)
def test_rows_that_cannot_be_read(dataset, columns, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        EvalPrompts.of(dataset, max_prompts=2, **columns)


# Contents in parts


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def test_references_in_parts_are_their_text():
    answer = {"role": "assistant", "content": parts("hel", "lo")}
    asked = [{"role": "user", "content": parts("hi")}]
    for dataset in (rows({"messages": [*asked, answer]}), rows({"prompt": asked, "completion": [answer]})):
        assert EvalPrompts.of(dataset) == EvalPrompts((asked,), ("hello",))
    references = [[answer], parts("hel", "lo"), "hello", ["hello", "hi"], 5]
    assert EvalPrompts.of(["a"] * 5, references).references == ("hello", "hello", "hello", ["hello", "hi"], 5)


def test_keys_that_only_other_parts_have_are_gone():
    content = [{"type": "text", "text": "hi", "cached": None}]
    prompts = EvalPrompts.of(rows({"prompt": [{"role": "user", "content": content}]}))
    assert prompts.prompts == ([{"role": "user", "content": parts("hi")}],)


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_parts_that_are_no_text_are_named(kind):
    answer = {"role": "assistant", "content": [{"type": kind, "text": None}]}
    asked = [{"role": "user", "content": parts("hi")}]
    for dataset in (rows({"messages": [*asked, answer]}), rows({"prompt": asked, "completion": [answer]})):
        with pytest.raises(ValueError, match=f"of row 0, part 0, is '{kind}', but only text is read"):
            EvalPrompts.of(dataset)
    with pytest.raises(ValueError, match=f"reference of row 1, part 0, is '{kind}'"):
        EvalPrompts.of(["a", "b"], ["x", [answer]])


# What rows tell the chat template


def test_tools_and_template_arguments_are_read_with_conversations():
    other = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object"}}}
    for tools in ([[TOOL], [other], []], [json.dumps([TOOL]), json.dumps([other]), None]):
        dataset = rows(
            {"prompt": CHAT, "tools": tools[0], "chat_template_kwargs": {"thinking": False}},
            {"prompt": CHAT, "tools": tools[1], "chat_template_kwargs": {"depth": 3}},
            {"prompt": CHAT, "tools": tools[2], "chat_template_kwargs": None},
        )
        expected = (
            {"tools": [TOOL], "chat_template_kwargs": {"thinking": False}},
            {"tools": [other], "chat_template_kwargs": {"depth": 3}},
            {},
        )
        assert EvalPrompts.of(dataset).template_settings == expected
        assert EvalPrompts.of(dataset.to_iterable_dataset(), max_prompts=9).template_settings == expected
        assert EvalPrompts.of(dataset).limited(2).template_settings == expected[:2]
        messages = dataset.map(lambda row: {"messages": [*CHAT, ANSWER]}).remove_columns("prompt")
        assert EvalPrompts.of(messages).template_settings == expected


def test_without_such_columns_and_with_texts_nothing_is_told():
    assert EvalPrompts.of(rows({"prompt": CHAT})).template_settings is None
    assert EvalPrompts.of(rows({"prompt": "hi", "tools": [TOOL]})).template_settings is None
    assert EvalPrompts.of(rows({"prompt": "hi", "tools": "hammer"})).template_settings is None
    assert EvalPrompts.of([CHAT]).template_settings is None


@pytest.mark.parametrize(
    "columns, sentence",
    [
        ({"tools": "hammer, saw"}, "Row 1 has to hold its `tools` as JSON, but holds 'hammer, saw'"),
        ({"tools": json.dumps(TOOL)}, "Row 1 has to hold a list of `tools`, but holds {'function'"),
        ({"tools": 5}, "Row 1 has to hold a list of `tools`, but holds 5"),
        ({"chat_template_kwargs": "thinking"}, "Row 1 has to hold a dict of `chat_template_kwargs`, but holds 'thin"),
    ],
)
def test_what_rows_cannot_tell_the_template(columns, sentence):
    empty = dict.fromkeys(columns)
    with pytest.raises((TypeError, ValueError), match=sentence):
        EvalPrompts.of(Dataset.from_list([{"prompt": CHAT, **empty}, {"prompt": CHAT, **columns}]))
