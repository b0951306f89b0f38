import pytest
from datasets import Dataset, DatasetDict, Features, Image, IterableDataset, Value
from PIL import UnidentifiedImageError

from tests.support.data_sets import CHAT, stream, table
from trainers.eval_prompts import EvalPrompts

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


def test_columns_of_none_are_as_good_as_not_given():
    assert EvalPrompts.of(["a"], None, None, prompt_column=None, split_marker=None) == EvalPrompts(("a",))


def test_references_beside_a_data_set():
    dataset = table(prompt=["a", "b", "c"], completion=["no", "no", "no"])
    assert EvalPrompts.of(dataset, ["A", "B", "C"], max_prompts=2) == EvalPrompts(("a", "b"), ("A", "B"))


def test_a_data_set_of_ids():
    assert EvalPrompts.of(table(input_ids=[[4, 5], [6]]), prompt_column="input_ids").prompts == ([4, 5], [6])
    torch_format = table(input_ids=[[4, 5]]).with_format("torch")
    assert EvalPrompts.of(torch_format, prompt_column="input_ids").prompts == ([4, 5],)


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
