import json
from typing import Any

import pytest

from hf_specgen.serving.openai_request import NEUTRAL_VALUES, from_openai
from hf_specgen.serving.sampling_params import SamplingParams


def read(**body: Any) -> SamplingParams:
    """As a server gets it: through JSON."""
    return from_openai(json.loads(json.dumps(body)))


def test_chat_body():
    params = read(
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
        user="u",
        max_completion_tokens=7,
        temperature=1,
        top_p=1,
        n=2,
        seed=5,
        stop=["a", "b"],
        presence_penalty=1,
        frequency_penalty=2,
        logit_bias={"50": -100, "7": 5},
        logprobs=True,
        top_logprobs=3,
    )
    assert params == SamplingParams(
        max_new_tokens=7,
        temperature=1.0,
        top_p=1.0,
        n=2,
        seed=5,
        stop=("a", "b"),
        presence_penalty=1.0,
        frequency_penalty=2.0,
        logit_bias={50: -100.0, 7: 5.0},
        logprobs=3,
    )
    (penalties, _) = params.logits_processor(4, ())
    assert penalties.scope == "generated"


def test_completions_body():
    assert read(model="m", prompt="p", max_tokens=3, stop="x", logprobs=2, best_of=1, echo=False, suffix=None) == (
        SamplingParams(max_new_tokens=3, stop="x", logprobs=2)
    )


def test_additions_of_vllm():
    params = read(
        top_k=5, min_p=0.1, repetition_penalty=2, min_tokens=4, ignore_eos=True, stop_token_ids=[9], temperature=0
    )
    assert params == SamplingParams(
        top_k=5,
        min_p=0.1,
        repetition_penalty=2.0,
        min_new_tokens=4,
        ignore_eos=True,
        stop_token_ids=(9,),
        temperature=0.0,
    )
    assert read(top_k=-1) == read(top_k=0) == SamplingParams()


def test_null_is_the_default():
    names = ["max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "seed", "stop", "presence_penalty"]
    names += ["frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "tools", "response_format", "best_of"]
    names += ["top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "unheard_of"]
    assert read(**dict.fromkeys(names)) == read() == SamplingParams()


@pytest.mark.parametrize(
    ("body", "logprobs"),
    [
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": 0}, 0),
        ({"logprobs": 5}, 5),
    ],
)
def test_logprobs_of_both_kinds_of_body(body, logprobs):
    assert read(**body).logprobs == logprobs


@pytest.mark.parametrize("body", [{"top_logprobs": 2}, {"top_logprobs": 2, "logprobs": False}])
def test_top_logprobs_without_logprobs_is_refused(body):
    with pytest.raises(ValueError, match="`logprobs`"):
        read(**body)


def test_budgets_have_to_agree():
    assert read(max_tokens=3, max_completion_tokens=3).max_new_tokens == 3
    with pytest.raises(ValueError, match="`max_completion_tokens`.* 3 and 4"):
        read(max_tokens=3, max_completion_tokens=4)
    with pytest.raises(ValueError, match="have to agree"):
        read(max_tokens=3, max_completion_tokens=[4])


def test_at_most_four_stops():
    assert read(stop=["a", "b", "c", "d"]).stop == ("a", "b", "c", "d")
    assert read(stop=[]).stop == ()
    with pytest.raises(ValueError, match="`stop`.*4.*5"):
        read(stop=["a", "b", "c", "d", "e"])


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"functions": [{}]},
        {"response_format": {"type": "json_object"}},
        {"best_of": 2},
        {"best_of": 3, "n": 2},
        {"best_of": 1, "n": 2},
        {"echo": True},
        {"suffix": "x"},
        {"store": True},
        {"modalities": ["audio"]},
        {"use_beam_search": True},
        {"guided_json": {}},
        {"reasoning_effort": "low"},
        {"skip_special_tokens": False},
        {"temprature": 1.0},
        {"max_new_tokens": 5},
    ],
)
def test_what_is_not_served_is_named(body):
    with pytest.raises(ValueError, match=f"not served.*{next(iter(body))}="):
        read(**body)


def test_all_that_is_not_served_is_named():
    with pytest.raises(ValueError, match="echo=True, frobnicate=1"):
        read(echo=True, temperature=1, frobnicate=1)


@pytest.mark.parametrize("name", NEUTRAL_VALUES)
def test_values_that_ask_for_nothing_are_accepted(name):
    for value in NEUTRAL_VALUES[name]:
        assert read(**{name: value}) == SamplingParams()


def test_as_many_best_as_wanted_is_no_selection():
    assert read(best_of=3, n=3) == SamplingParams(n=3)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"max_tokens": 0}, ValueError),
        ({"max_completion_tokens": 1.5}, TypeError),
        ({"min_tokens": -1}, ValueError),
        ({"temperature": "hot"}, TypeError),
        ({"temperature": float("nan")}, ValueError),
        ({"temperature": True}, TypeError),
        ({"top_p": 0}, ValueError),
        ({"top_k": -2}, ValueError),
        ({"stop": ""}, ValueError),
        ({"stop": [1]}, TypeError),
        ({"logit_bias": {"abc": 1}}, ValueError),
        ({"logit_bias": {"5": "x"}}, TypeError),
        ({"seed": -1}, ValueError),
        ({"n": 0}, ValueError),
        ({"logprobs": -1}, ValueError),
        ({"logprobs": "yes"}, TypeError),
        ({"stop_token_ids": [-5]}, ValueError),
    ],
)
def test_value_that_breaks_a_rule_is_refused_in_the_words_of_the_body(body, error):
    with pytest.raises(error, match=f"`{next(iter(body))}`"):
        read(**body)


@pytest.mark.parametrize("body", [None, [], "{}", [("n", 1)]])
def test_body_that_is_no_mapping_is_refused(body):
    with pytest.raises(TypeError, match="`body`"):
        from_openai(body)


def test_body_is_left_as_it_is():
    body = {"n": 2, "best_of": 2, "stop": ["a"], "top_k": -1, "logit_bias": {"5": 1}}
    before = json.dumps(body)
    from_openai(body)
    assert json.dumps(body) == before


def test_seed_of_64_bits_and_words_for_the_answer_are_fine():
    body = {"seed": 12345678901, "metadata": {}, "service_tier": "auto", "request_id": "a", "priority": 0}
    assert from_openai(body).seed == 12345678901 % 2**32
