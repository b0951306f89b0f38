import pytest
from datasets import Dataset, DatasetDict, Features, Image, IterableDataset, Value
from PIL import UnidentifiedImageError

from trainers.eval_prompts import EvalPrompts

CHAT = [{"role": "user", "content": "hi"}]
ANSWER = {"role": "assistant", "content": "hello"}


def table(**columns):
    return Dataset.from_dict(columns)


def rows(*rows):
    return Dataset.from_list(list(rows))


def stream(**columns):
    """A data set that does not tell its length."""
    return table(**columns).to_iterable_dataset()


# Lists


def test_prompts_of_every_kind_stay_as_they_are():
    prompts = ["hi", [5, 6], CHAT]
    assert EvalPrompts.of(prompts) == EvalPrompts(("hi", [5, 6], CHAT), None)


def test_references_of_a_list_of_prompts():
    assert EvalPrompts.of(["a", "b"], ["A", ["B", "b"]]).references == ("A", ["B", "b"])


def test_a_column_of_a_data_set_is_a_list():
    assert EvalPrompts.of(table(q=["a", "b"])["q"]).prompts == ("a", "b")


def test_limited_keeps_the_first_prompts_with_their_references():
    prompts = EvalPrompts.of(["a", "b", "c"], ["A", "B", "C"])
    assert prompts.limited(2) == EvalPrompts(("a", "b"), ("A", "B"))
    assert prompts.limited(None) == prompts == prompts.limited(7)
    assert EvalPrompts.of(["a", "b"]).limited(1) == EvalPrompts(("a",), None)
    assert EvalPrompts.of(["a", "b", "c"], ["A", "B", "C"], max_prompts=2) == prompts.limited(2)


# Data sets


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


def test_columns_of_none_are_as_good_as_not_given():
    assert EvalPrompts.of(["a"], None, None, prompt_column=None, split_marker=None) == EvalPrompts(("a",))


def test_references_beside_a_data_set():
    dataset = table(prompt=["a", "b", "c"], completion=["no", "no", "no"])
    assert EvalPrompts.of(dataset, ["A", "B", "C"], max_prompts=2) == EvalPrompts(("a", "b"), ("A", "B"))


def test_a_data_set_of_ids():
    assert EvalPrompts.of(table(input_ids=[[4, 5], [6]]), prompt_column="input_ids").prompts == ([4, 5], [6])
    torch_format = table(input_ids=[[4, 5]]).with_format("torch")
    assert EvalPrompts.of(torch_format, prompt_column="input_ids").prompts == ([4, 5],)


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


def test_a_stream_is_read_up_to_the_limit():
    def endless():
        number = 0
        while True:
            yield {"prompt": f"p{number}", "answer": f"a{number}"}
            number += 1

    prompts = EvalPrompts.of(IterableDataset.from_generator(endless), max_prompts=2)
    assert prompts == EvalPrompts(("p0", "p1"), ("a0", "a1"))
    torch_format = stream(input_ids=[[4, 5]]).with_format("torch")
    assert EvalPrompts.of(torch_format, max_prompts=9, prompt_column="input_ids") == EvalPrompts(([4, 5],))


def test_other_columns_are_not_decoded():
    broken = Features({"prompt": Value("string"), "image": Image()})
    dataset = Dataset.from_dict({"prompt": ["a"], "image": [{"bytes": b"no image", "path": None}]}, features=broken)
    with pytest.raises(UnidentifiedImageError):
        dataset[0]
    assert EvalPrompts.of(dataset) == EvalPrompts(("a",))


def test_a_transform_is_applied():
    dataset = table(a=[1, 2]).with_transform(lambda batch: {"prompt": [f"{a}+1=" for a in batch["a"]]})
    assert EvalPrompts.of(dataset) == EvalPrompts(("1+1=", "2+1="))


# What is refused


@pytest.mark.parametrize(
    "prompts, sentence",
    [
        ("hi", "`prompts` has to be a list"),
        (None, "`prompts` has to be a list"),
        (CHAT[0], "`prompts` has to be a list"),
        ([5, 6], "number 0 is 5. A single prompt stands in a list of its own"),
        (CHAT, "number 0 is .*A single prompt stands in a list of its own"),
        (["a", [5, "b"]], "number 1 is"),
        ([[]], r"number 0 is \[\]"),
        ([[True]], r"number 0 is \[True\]"),
        ([[{"content": "no role"}]], "number 0 is"),
        (
            DatasetDict({"test": table(prompt=["a"]), "train": table(prompt=["a"])}),
            r"choose one of \['test', 'train'\]",
        ),
    ],
)
def test_what_are_no_prompts(prompts, sentence):
    with pytest.raises(TypeError, match=sentence):
        EvalPrompts.of(prompts)


@pytest.mark.parametrize("prompts", [[], table(prompt=[]), Dataset.from_dict({}), stream(prompt=["a"]).skip(1)])
def test_no_prompts_at_all(prompts):
    with pytest.raises(ValueError, match="`prompts` has to hold at least one prompt"):
        EvalPrompts.of(prompts, max_prompts=3)


def test_references_have_to_fit():
    with pytest.raises(ValueError, match="one for each of the 2 prompts, but holds 1"):
        EvalPrompts.of(["a", "b"], ["A"])
    with pytest.raises(ValueError, match="one for each of the 2 rows, but holds 3"):
        EvalPrompts.of(table(prompt=["a", "b"]), ["A", "B", "C"], max_prompts=1)
    with pytest.raises(TypeError, match="`references` has to be a list"):
        EvalPrompts.of(["a"], "A")  # a text is a sequence of texts
    with pytest.raises(ValueError, match="`references` and `completion_column`"):
        EvalPrompts.of(table(q=["a"], a=["A"]), ["B"], prompt_column="q", completion_column="a")


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
        (rows({"messages": [*CHAT, {"role": "assistant", "content": None}]}), {}, "Row 0 has to answer with a text"),
        (rows({"prompt": "a", "completion": [ANSWER, ANSWER]}), {}, "Row 0 has to complete with one message"),
        (table(prompt=[5]), {}, "number 0 is 5"),
        (stream(text=["no marker"]), {"split_marker": "="}, "Row 0 has to hold the `split_marker`"),
    ],
)
def test_rows_that_cannot_be_read(dataset, columns, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        EvalPrompts.of(dataset, max_prompts=2, **columns)


@pytest.mark.parametrize(
    "max_prompts, error", [(0, ValueError), (-1, ValueError), (True, TypeError), ("2", TypeError)]
)
def test_limits_that_are_none(max_prompts, error):
    with pytest.raises(error, match="`max_prompts` has to be"):
        EvalPrompts.of(["a"], max_prompts=max_prompts)
    with pytest.raises(error, match="`max_prompts` has to be"):
        EvalPrompts.of(["a"]).limited(max_prompts)


def test_a_stream_needs_a_limit():
    with pytest.raises(ValueError, match="`max_prompts` has to be given for an IterableDataset"):
        EvalPrompts.of(stream(prompt=["a"]))
