"""What ends a row is no part of its text, and its answer tells what it was: for every kind of backend."""

import copy
import dataclasses

import pytest

from hf_specgen import RequestError, SamplingParams, from_openai, get_generation_backend
from tests.support.models import character_tokenizer, cycle_model
from tests.support.serving import greedy

KINDS = ["eager", "batched", "lookup", "speculative"]
LETTERS = "?!abcdefghij"


def letters_in_turn():
    """From a to j, and again."""
    return cycle_model([0, 1, *range(3, 12), 2])


def backend_of_cycle(kind, model, letters):
    settings = {"draft_model": copy.deepcopy(model)} if kind == "speculative" else {}
    return get_generation_backend(
        kind.replace("lookup", "speculative"), model, character_tokenizer(letters), **settings
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_eos", [False, True])
def test_ordinary_token_that_ends_a_row_is_no_part_of_any_text(kind, is_eos):
    """Ids and log-probabilities hold it; the text, the stream and the texts of several samples do not."""
    letters = "?!abcdefghijklmnopqrstuvwxyz"
    model = cycle_model([0, 1, *range(3, 28), 2])
    end = letters.index("h")
    if is_eos:
        model.generation_config.eos_token_id = end
    backend = backend_of_cycle(kind, model, letters)
    params = greedy(20, logprobs=0, stop_token_ids=[] if is_eos else [end])
    prompt = "abcdefghijklmabc"  # which can be looked up
    (completion,) = backend.generate([prompt], params)
    assert completion.text == "defg" and "".join(backend.stream(prompt, params)) == "defg"
    assert list(completion.token_ids) == [letters.index(c) for c in "defgh"] and len(completion.logprobs) == 5
    assert (completion.finish_reason, completion.stop_reason) == ("eos", end)
    assert (completion.num_prompt_tokens, completion.num_generated_tokens) == (16, 5)
    assert [c.text for c in backend.generate([prompt], dataclasses.replace(params, n=3))] == ["defg"] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_stop_string_counts_once_min_tokens_are_there(kind):
    model = letters_in_turn()
    backend = backend_of_cycle(kind, model, LETTERS)
    for minimum, stop, text in [
        (0, "fg", "de"),
        (3, "fg", "de"),  # begins below the floor and ends above it
        (4, "fg", "defghijabcde"),
        (14, "fg", "defghijabcdefghijabcd"),
    ]:
        params = from_openai({"min_tokens": minimum, "stop": [stop], "max_tokens": 21, "temperature": 0})
        (completion,) = backend.generate(["abcdefghijabc"], params)
        assert completion.text == text == "".join(backend.stream("abcdefghijabc", params))
        is_stopped = len(text) < 20
        assert (completion.finish_reason, completion.stop_reason) == (
            ("stop", stop) if is_stopped else ("length", None)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_budget_that_nobody_gave_is_what_the_window_leaves(kind):
    model = letters_in_turn()
    backend = backend_of_cycle(kind, model, LETTERS)  # of 512 positions
    params = SamplingParams(temperature=0)
    for prompt_length, budget in [(3, 256), (256, 256), (257, 255), (500, 12), (511, 1)]:
        (completion,) = backend.generate(["a" * prompt_length], params)
        assert (completion.num_generated_tokens, completion.finish_reason) == (budget, "length")
    assert len(backend.generate(["abc"], from_openai({"min_tokens": 300, "temperature": 0}))[0].token_ids) == 300
    for settings in ({}, {"min_new_tokens": 1}):
        assert "512 positions" in str(backend.refusal("a" * 512, dataclasses.replace(params, **settings)))
    error = backend.refusal("a" * 400, dataclasses.replace(params, min_new_tokens=200))
    assert "`min_new_tokens` of 200" in str(error) and error.code == "context_length_exceeded"
    error = backend.refusal("a" * 400, dataclasses.replace(params, max_new_tokens=200))
    assert "`max_new_tokens` of 200" in str(error) and error.param == "max_new_tokens"


def test_budget_that_nobody_gave_is_what_the_cache_leaves():
    model = letters_in_turn()
    backend = get_generation_backend(
        "batched", model, character_tokenizer(LETTERS), max_tokens_in_cache=164, max_batch_size=1
    )
    assert backend.generate(["a" * 60], greedy(None))[0].num_generated_tokens == 40
    error = backend.refusal("a" * 60, greedy(41))
    assert "`max_tokens_in_cache` is 164" in str(error) and error.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="`max_tokens_in_cache` is 164"):
        backend.stream("a" * 60, greedy(41))


def test_prompt_without_room_is_cut_where_that_was_asked_for():
    model = letters_in_turn()
    backend = get_generation_backend("batched", model, character_tokenizer(LETTERS), truncate_prompt="left")
    for prompt_length, kept in [(511, 511), (512, 256), (5000, 256)]:
        (completion,) = backend.generate(["a" * prompt_length], greedy(None))
        assert completion.num_prompt_tokens == kept and completion.num_generated_tokens == 512 - kept
