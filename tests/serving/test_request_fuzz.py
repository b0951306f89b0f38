"""Whatever a client sends is served or refused in a sentence, before anything runs."""

import random
from typing import Any

import pytest

from hf_specgen import RequestError, SamplingParams, from_openai
from hf_specgen.serving import GenerationBackend
from tests.support.request_bodies import random_body
from tests.support.serving import backend_of

LONGEST = 800  # characters of a sentence


def outcome(backend: GenerationBackend, body: dict[str, Any]) -> str:
    """What became of a body: "served", or who refused it."""
    try:
        params = from_openai(body)
    except Exception as error:
        assert_is_sentence(error)
        assert any(name in str(error) for name in (error.param, f"`{error.param}`")), (error.param, str(error))
        return "refused by from_openai"
    assert isinstance(params, SamplingParams)
    prompt = body.get("messages", body.get("prompt"))
    error = backend.refusal(prompt, params)
    if error is None:
        return "served"
    assert_is_sentence(error)
    return "refused by the backend"


def assert_is_sentence(error: Exception) -> None:
    assert isinstance(error, RequestError) and isinstance(error.code, str), repr(error)
    words = str(error)
    assert 10 < len(words) < LONGEST, words
    words.encode()  # can be printed and sent
    assert error.param is not None or error.code == "context_length_exceeded", words


@pytest.mark.parametrize("seed", range(10))
def test_random_bodies_are_served_or_refused_in_a_sentence(seed):
    draw, backend = random.Random(seed), backend_of("batched")
    outcomes = [outcome(backend, random_body(draw)) for _ in range(200)]
    assert {"served", "refused by from_openai", "refused by the backend"} == set(outcomes)
    assert backend.stats.target_forwards == 0
