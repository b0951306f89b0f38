"""Names of other systems, and names that are nearly right, are refused with what to write instead."""

import copy
import dataclasses
import inspect
import pickle

import pytest

from hf_specgen import RequestError, SamplingParams
from hf_specgen.serving.parameter_names import HINTS

FIELDS = {entry.name for entry in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max_tokens", "it is called `max_new_tokens` here"),
        ("num_return_sequences", "it is called `n` here"),
        ("do_sample", "`temperature=0`"),
        ("best_of", "every one of `n` texts"),
        ("temprature", "Is `temperature` meant?"),
        ("stop_token_id", "Is `stop_token_ids` meant?"),
        ("wheels", "it takes `max_new_tokens`, "),
    ],
)
def test_an_unknown_name_is_refused_with_what_to_write(name, words):
    with pytest.raises(TypeError) as caught:
        SamplingParams(temperature=0, **{name: 3})
    assert f"takes no `{name}`" in str(caught.value) and words in str(caught.value)
    assert isinstance(caught.value, RequestError)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)


def test_hints_are_for_names_that_are_not_taken_and_lead_to_ones_that_are():
    assert HINTS.keys() & FIELDS == set()
    known = FIELDS | {"stop_reason", "token_ids"}  # the last two are a completion's
    for hint in HINTS.values():
        named = [words.partition("=")[0] for words in hint.split("`")[1::2]]
        assert set(named) <= known, hint


def test_the_signature_copies_and_replacements_are_a_dataclass_s():
    assert set(inspect.signature(SamplingParams).parameters) == FIELDS
    params = SamplingParams(temperature=0.5, stop=["a"])
    assert params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))
    assert dataclasses.replace(params, n=2) == SamplingParams(temperature=0.5, stop=["a"], n=2)
    with pytest.raises(TypeError):
        SamplingParams(64)
