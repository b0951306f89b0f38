import json
import pickle
from typing import Any

import numpy as np
import pytest

from hf_specgen.serving.openai_request import NEUTRAL_VALUES, from_openai
from hf_specgen.serving.request_error import RequestError
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
        ({"seed": 2**64}, ValueError),
        ({"seed": -(2**63) - 1}, ValueError),
        ({"seed": 1.5}, TypeError),
        ({"n": 129}, ValueError),
        ({"n": 2**70}, ValueError),
        ({"n": True}, TypeError),
        ({"logprobs": 21}, ValueError),
        ({"top_logprobs": 21, "logprobs": True}, ValueError),
        ({"top_logprobs": 1.0, "logprobs": True}, TypeError),
        ({"stop": "\ud800"}, ValueError),
        ({"tools": {}}, TypeError),
        ({"tools": ["look"]}, TypeError),
        ({"documents": "x"}, TypeError),
        ({"chat_template_kwargs": []}, TypeError),
        ({"chat_template_kwargs": {"tokenize": True}}, ValueError),
        ({"continue_final_message": "yes"}, TypeError),
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


@pytest.mark.parametrize("seed", [12345678901, -1, -(2**63), 2**64 - 1])
def test_seed_of_64_bits_and_words_for_the_answer_are_fine(seed):
    body = {"seed": seed, "metadata": {}, "service_tier": "auto", "request_id": "a", "priority": 0}
    assert read(**body).seed == seed


@pytest.mark.parametrize(
    "body",
    [
        {"logprobs": False, "top_logprobs": 0},
        {"logprobs": False, "top_logprobs": None},
        {"top_logprobs": 0},
        {"n": 1, "best_of": 1},
        {"add_generation_prompt": True},
        {"add_generation_prompt": True, "continue_final_message": False},
        {"stop": [], "stop_token_ids": [], "tools": [], "documents": [], "functions": [], "bad_words": []},
        {"logit_bias": {}, "chat_template_kwargs": {}},
        {"tool_choice": "auto", "function_call": "auto", "parallel_tool_calls": True},
        {"skip_special_tokens": True, "detokenize": True, "include_reasoning": True, "add_special_tokens": False},
    ],
)
def test_what_clients_send_by_default_asks_for_nothing(body):
    assert read(**body) == SamplingParams()


@pytest.mark.parametrize(
    "body",
    [
        {"top_logprobs": True},
        {"top_logprobs": 1, "logprobs": 3},
        {"add_generation_prompt": False},
        {"add_generation_prompt": 1},
        {"add_generation_prompt": True, "continue_final_message": True},
        {"store": 0},
        {"skip_special_tokens": 1},
    ],
)
def test_what_only_looks_like_a_default_is_refused(body):
    with pytest.raises(RequestError, match=f"{next(iter(body))}|logprobs"):
        read(**body)


def test_what_the_chat_template_is_told():
    look = {"type": "function", "function": {"name": "look", "parameters": {}}}
    body = {
        "tools": [look],
        "documents": [{"title": "a", "text": "b"}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    settings = {"tools": [look], "documents": body["documents"], "enable_thinking": False}
    assert read(**body).template_settings() == {**settings, "add_generation_prompt": True}
    assert read(tools=[look], tool_choice="auto").tools == (look,)
    assert read(tools=[look], tool_choice="none").tools is None
    assert read(continue_final_message=True, add_generation_prompt=False).continue_final_message


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("temperature", lambda number: number),
        ("max_tokens", lambda number: number),
        ("seed", lambda number: number),
        ("n", lambda number: number),
        ("logprobs", lambda number: number),
        ("stop", lambda number: [number]),
        ("stop_token_ids", lambda number: [1, number]),
        ("logit_bias", lambda number: {"5": number}),
        ("chat_template_kwargs", lambda number: {"a": [{"b": number}]}),
        ("tools", lambda number: [{"function": {"parameters": {"maximum": number}}}]),
        ("unheard_of", lambda number: [[number]]),
    ],
)
def test_numbers_that_json_does_not_have_are_refused_by_their_field(name, place, number):
    with pytest.raises(RequestError, match=f"`{name}` has to consist of finite numbers") as raised:
        read(**{name: place(number)})
    assert (raised.value.code, raised.value.param) == ("invalid_value", name)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_completion_tokens": "5"}, "invalid_type", "max_completion_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "invalid_value", "min_tokens"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"top_logprobs": 50, "logprobs": True}, "invalid_value", "top_logprobs"),
        ({"echo": True}, "unsupported_parameter", "echo"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"tool_choice": {"type": "function"}}, "unsupported_parameter", "tool_choice"),
        ({"stop": ["a"] * 5}, "invalid_value", "stop"),
    ],
)
def test_refusal_has_a_code_and_names_the_field(body, code, param):
    with pytest.raises(RequestError, match=f"`?{param}`?") as raised:
        read(**body)
    assert (raised.value.code, raised.value.param) == (code, param)
    copied = pickle.loads(pickle.dumps(raised.value))
    assert (type(copied), str(copied), copied.code, copied.param) == (
        type(raised.value),
        str(raised.value),
        code,
        param,
    )


def test_nested_and_long_values_are_cut_in_the_sentence():
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, "x" * 10**6, list(range(10**5)), {str(i): i for i in range(10**5)}, 10**6000):
        for name in ("unheard_of", "temperature", "stop", "tools", "max_tokens"):
            with pytest.raises((RequestError), match=name) as raised:
                from_openai({name: value})
            assert len(str(raised.value)) < 600


CALLS: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"temperature": None, "top_p": None, "n": None, "seed": None, "stop": None, "logprobs": None, "tools": None},
    {"n": 1, "logprobs": False, "top_logprobs": 0, "stop": [], "logit_bias": {}, "tools": [], "store": False},
    {"tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}, "modalities": ["text"]},
    {"user": "u", "metadata": {}, "service_tier": "auto", "safety_identifier": "a", "prompt_cache_key": "b"},
    {"prompt_cache_retention": "24h", "verbosity": "medium", "seed": -5},
    {"extra_body": {"add_generation_prompt": True, "chat_template_kwargs": {}, "top_k": -1, "min_p": 0}},
]


@pytest.mark.parametrize("settings", CALLS)
def test_bodies_of_the_client_of_openai_are_read(settings):
    """What the installed client makes of a call, with fields that ask for nothing."""
    openai, httpx = pytest.importorskip("openai"), pytest.importorskip("httpx")
    bodies = []

    def refuse(request: Any) -> Any:
        bodies.append(json.loads(request.content))
        return httpx.Response(400, json={"error": {"message": "only looking"}})

    with httpx.Client(transport=httpx.MockTransport(refuse)) as connection:
        client = openai.OpenAI(api_key="none", base_url="http://here/v1", max_retries=0, http_client=connection)
        messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="m", messages=messages, **settings)
    (body,) = bodies
    assert body["messages"] == messages
    assert from_openai(body) == SamplingParams(seed=settings.get("seed"))


@pytest.mark.parametrize("name", ["seed", "n", "temperature", "response_format", "best_of", "tool_choice", "stop"])
def test_values_that_are_not_of_json_are_named(name):
    with pytest.raises(RequestError, match=f"`{name}` has to be a value of JSON"):
        from_openai({name: np.array([0.5])})


def test_numbers_of_numpy_are_numbers():
    assert from_openai({"temperature": np.float64(0.5), "n": np.int64(2)}) == from_openai({"temperature": 0.5, "n": 2})
    with pytest.raises(RequestError, match="`temperature`"):
        from_openai({"temperature": np.float64("nan")})
