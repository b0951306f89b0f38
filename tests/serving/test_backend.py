"""Prompts of every kind, the window, failures: what is wrong with one request concerns no other."""

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from transformers import LogitsProcessorList

from hf_specgen import DecodingStats
from hf_specgen.serving.backends import get_generation_backend
from hf_specgen.serving.openai_request import from_openai
from hf_specgen.serving.request_error import RequestError
from hf_specgen.serving.sampling_params import SamplingParams
from tests.support.models import BOS, VOCAB_SIZE
from tests.support.serving import (
    KINDS,
    Fault,
    assert_answers,
    backend_of,
    drafter_of,
    greedy,
    mixed_params,
    plain_ids,
    plain_text,
    raise_at,
    random_prompts,
    target_of,
)
from tests.support.streaming import assert_idle
from tests.support.tokenizers import LETTERS, TOKENIZER, ids_of, letters_tokenizer

# Prompts


def test_prompt_may_be_a_text_ids_or_messages():
    backend = backend_of("batched")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    as_text = "<bos>u hi.a ok.a "
    params = greedy(12)
    of_text, of_ids, of_messages = backend.generate(["hi there", ids_of("hi there"), messages], params)
    assert of_text.text == of_ids.text == plain_text("hi there", params)[0]
    assert of_ids.prompt == "<bos>hi there" and of_text.prompt == "hi there"
    assert of_messages.prompt == as_text
    chat_ids = letters_tokenizer(adds_bos=False)(as_text)["input_ids"]
    assert chat_ids.count(BOS) == 1 and chat_ids[0] == BOS
    assert list(of_messages.token_ids) == plain_ids(chat_ids, params)
    doubled = plain_ids([BOS, *chat_ids], params)
    assert list(of_messages.token_ids) != doubled, "it would not be seen here"
    assert tuple(of_messages.token_ids) == backend.generate([tuple(chat_ids)], params)[0].token_ids


def refused(prompt, params=None, kind="batched", **settings):
    """The error of one request between two others, which are served."""
    backend = backend_of(kind, **settings)
    params = greedy(5) if params is None else params
    first, middle, last = backend.generate(["abc", prompt, "xyz"], [greedy(5), params, greedy(6)])
    assert_answers([first], ["abc"], [greedy(5)])
    assert last.text == plain_text("xyz", greedy(6))[0] and last.index == 2
    assert (middle.text, middle.token_ids, middle.finish_reason, middle.index) == ("", (), "error", 1)
    with pytest.raises(type(middle.error)) as raised:
        backend.stream(prompt, params)
    assert str(raised.value) == str(middle.error).replace("Prompt 1", "Prompt 0")
    assert_idle(backend)
    return middle.error


BAD_PROMPTS = {
    "empty ids": ([], ValueError, "empty"),
    "none": (None, TypeError, ""),
    "a number": (5, TypeError, ""),
    "negative id": ([5, -100], ValueError, "-100"),
    "id over the vocabulary": ([5, VOCAB_SIZE], ValueError, str(VOCAB_SIZE)),
    "enormous id": ([5, 10**15], ValueError, str(10**15)),
    "float id": ([5.0], TypeError, "5.0"),
    "bool id": ([True], TypeError, "True"),
    "nested": ([[5]], TypeError, "a list of 1 (list)"),
    "tensor of rows": (torch.tensor([[5]]), TypeError, "shape (1, 1)"),
    "bytes": (b"abc", TypeError, "bytes"),
    "ids without an order": ({5, 6}, TypeError, "set"),
    "tensor of fractions": (torch.tensor([5.0]), TypeError, "shape (1,)"),
    "array of no prompt": (np.array(5), TypeError, "shape ()"),
    "one message without its list": ({"role": "user", "content": "hi"}, TypeError, "role"),
    "messages and text": ([{"role": "user", "content": "hi"}, "hi"], TypeError, "(dict, str)"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_prompt_that_is_none_is_refused_for_itself_alone(case):
    prompt, kind, words = BAD_PROMPTS[case]
    error = refused(prompt)
    assert isinstance(error, RequestError) and isinstance(error, kind) and words in str(error)
    assert "rompt 1" in str(error) or "essage" in str(error)


@pytest.mark.parametrize("prompt", [[{"role": "tool", "content": "hi"}], [{"content": "hi"}]])
def test_messages_that_the_template_refuses_are_refused_for_themselves_alone(prompt):
    error = refused(prompt)
    assert isinstance(error, RequestError) and error.param == "messages"
    assert ("no tools here" if "role" in prompt[0] else "`role`") in str(error)


def test_messages_without_a_template_are_refused_for_themselves_alone():
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = None
    backend = get_generation_backend("batched", target_of(), tokenizer)
    good, bad = backend.generate(["abc", [{"role": "user", "content": "hi"}]], greedy(5))
    assert good.text == plain_text("abc", greedy(5))[0]
    assert isinstance(bad.error, ValueError) and "chat_template" in str(bad.error)


def test_empty_text_is_refused_where_it_has_no_token():
    backend = get_generation_backend("batched", target_of(), letters_tokenizer(adds_bos=False))
    good, bad = backend.generate(["abc", ""], greedy(5))
    assert good.finish_reason == "length" and isinstance(bad.error, ValueError) and "empty" in str(bad.error)
    assert backend_of("batched").generate([""], greedy(5))[0].text == plain_text([BOS], greedy(5))[0]


@pytest.mark.parametrize("params", [None, {"temperature": 0}, "greedy", [greedy(5)]])
def test_params_of_a_wrong_type_are_refused_for_themselves_alone(params):
    backend = backend_of("batched")
    good, bad = backend.generate(["abc", "xyz"], [greedy(5), params])
    assert good.text == plain_text("abc", greedy(5))[0]
    assert isinstance(bad.error, TypeError) and "`params`" in str(bad.error) and bad.finish_reason == "error"
    with pytest.raises(TypeError, match="`params`"):
        backend.stream("abc", params)


def test_stop_ids_outside_the_vocabulary_are_refused_for_their_request():
    assert str(VOCAB_SIZE) in str(refused("abc", greedy(5, stop_token_ids=[VOCAB_SIZE])))


CONVERSATION = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "prompts",
    [
        "abc",
        b"abc",
        {"a": "b"},
        None,
        5,
        [5, 6],
        (5, 6),
        range(3, 6),
        torch.tensor([5, 6]),
        torch.tensor(5),
        np.array([5, 6]),
        pd.Series([5, 6]),
        CONVERSATION,
        {"abc", "xyz"},
    ],
)
def test_prompts_that_are_no_list_are_refused(prompts):
    backend = backend_of("batched")
    for call in (backend.generate, backend.stream_batch):
        with pytest.raises(TypeError, match="`prompts` has to be a list"):
            call(prompts, greedy(5))


def test_params_have_to_be_as_many_as_prompts():
    backend = backend_of("batched")
    for call in (backend.generate, backend.stream_batch):
        with pytest.raises(ValueError, match="one entry per prompt, 2, but holds 1"):
            call(["abc", "xyz"], [greedy(5)])
    assert backend.generate([], greedy(5)) == backend.generate([], []) == []
    for call in (backend.generate, backend.stream_batch):
        for params in ({"temperature": 0}, None, 5, "greedy"):
            with pytest.raises(TypeError, match="`params` has to be"):
                call(["abc", "xyz"], params)


def test_tables_are_refused_and_their_columns_are_prompts():
    backend, table = backend_of("batched"), pd.DataFrame({"prompt": ["abc", "xyz"]})
    for whole in (table, datasets.Dataset.from_pandas(table)):
        with pytest.raises(TypeError, match="`prompts` has to be one column"):
            backend.generate(whole, greedy(5))
    expected = [c.text for c in backend.generate(["abc", "xyz"], greedy(5))]
    for column in (table["prompt"], datasets.Dataset.from_pandas(table)["prompt"]):
        assert [c.text for c in backend.generate(column, greedy(5))] == expected


@pytest.mark.parametrize(
    "held",
    [
        tuple,
        iter,
        np.array,
        torch.tensor,
        pd.Series,
        lambda prompts: np.array([*prompts, None], dtype=object)[:-1],
        lambda prompts: [np.array(ids) for ids in prompts],
        lambda prompts: [torch.tensor(ids) for ids in prompts],
        lambda prompts: [np.array(ids, dtype=np.int32) for ids in prompts],
        lambda prompts: [[np.int64(token) for token in ids] for ids in prompts],
        lambda prompts: (iter(ids) for ids in prompts),
        lambda prompts: {number: ids for number, ids in enumerate(prompts)}.values(),
    ],
)
def test_prompts_of_ids_may_be_held_by_anything(held):
    backend, prompts = backend_of("batched"), [[5, 6, 7], [8, 9, 10]]
    expected = [c.token_ids for c in backend.generate(prompts, greedy(5))]
    for found in (backend.generate(held(prompts), greedy(5)), backend.generate(held(prompts), iter([greedy(5)] * 2))):
        assert [c.token_ids for c in found] == expected


# The window


def test_prompt_over_the_window_is_refused_with_both_numbers():
    limit = target_of().config.max_position_embeddings
    error = refused("a" * 240, greedy(16))
    assert "241 tokens" in str(error) and "`max_new_tokens` of 16" in str(error) and str(limit) in str(error)
    fits = backend_of("batched").generate(["a" * 239], greedy(16))[0]
    assert fits.text == plain_text("a" * 239, greedy(16))[0]


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_window_of_learned_positions(family):
    backend = backend_of("batched", family)
    refused_one, fits = backend.generate(["a" * 240, "a" * 239], greedy(16))
    assert "241 tokens" in str(refused_one.error)
    assert fits.text == plain_text("a" * 239, greedy(16), family)[0]


def test_truncation_keeps_the_end_of_a_prompt():
    backend = backend_of("batched", truncate_prompt="left")
    text = random_prompts(1, seed=4, longest=1)[0] * 200 + "".join(LETTERS) * 3
    (completion,) = backend.generate([text], greedy(16))
    kept = ids_of(text)[-240:]
    assert list(completion.token_ids) == plain_ids(kept, greedy(16))
    assert completion.prompt == TOKENIZER.decode(kept)
    assert completion.error is None
    (short,) = backend.generate(["abc"], greedy(16))
    assert list(short.token_ids) == plain_ids("abc", greedy(16)) and short.prompt == "abc"
    (no_room,) = backend.generate(["abc"], greedy(256))
    assert "4 tokens" in str(no_room.error) and "256" in str(no_room.error)


@pytest.mark.parametrize("value", ["right", True, 5, ""])
def test_other_ends_to_truncate_are_refused(value):
    with pytest.raises(ValueError, match='`truncate_prompt` has to be None or "left"'):
        backend_of("batched", truncate_prompt=value)


# Failures


@pytest.mark.parametrize("kind", KINDS)
def test_failure_of_one_requests_processor_is_attached_to_it(monkeypatch, kind):
    """The bias of one request breaks after some tokens."""
    backend = backend_of(kind)
    prompts, params = random_prompts(5, seed=15), [greedy(12) for _ in range(5)]
    params[2] = greedy(12, logit_bias={10: 1.0}, ignore_eos=True)
    make = SamplingParams.logits_processor

    def breaks(input_ids, scores):
        if input_ids.shape[1] >= len(ids_of(prompts[2])) + 4:
            raise Fault("no luck")
        return scores

    def with_fault(self, *args):
        made = make(self, *args)
        return LogitsProcessorList([*made, breaks]) if self.logit_bias else made

    monkeypatch.setattr(SamplingParams, "logits_processor", with_fault)
    found = backend.generate(prompts, params)
    assert isinstance(found[2].error, Fault) and found[2].finish_reason == "error"
    assert list(found[2].token_ids) == plain_ids(prompts[2], params[2])[:4]
    assert found[2].text == TOKENIZER.decode(found[2].token_ids)
    others = [0, 1, 3, 4]
    for number in others:
        assert found[number].text == plain_text(prompts[number], params[number])[0]
    stream = backend.stream(prompts[2], params[2])
    with pytest.raises(Fault, match="no luck"):
        list(stream)
    assert stream.completion.finish_reason == "error"


def test_bans_of_everything_are_an_error_of_their_request():
    everything = greedy(5, logit_bias={i: -float("inf") for i in range(VOCAB_SIZE)})
    good, bad = backend_of("batched").generate(["abc", "xyz"], [greedy(5), everything])
    assert good.text == plain_text("abc", greedy(5))[0]
    assert isinstance(bad.error, ValueError) and bad.finish_reason == "error" and bad.text == ""


@pytest.mark.parametrize("number", [1, 2, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_model_that_raises_fails_the_requests_of_its_pass_and_the_backend_goes_on(monkeypatch, kind, number):
    backend = backend_of(kind)
    prompts, params = random_prompts(5, seed=16), [greedy(12)] * 5
    with monkeypatch.context() as patch:
        patch.setattr(target_of(), "forward", raise_at(target_of().forward, number))
        with pytest.warns(UserWarning, match="of 5 requests were refused or failed.*Fault: broken"):
            found = backend.generate(prompts, params)
    failed = [c for c in found if c.error is not None]
    assert failed and all(isinstance(c.error, Fault) and c.finish_reason == "error" for c in failed)
    for completion in found:
        text = plain_text(prompts[completion.index], params[0])[0]
        assert completion.text == text if completion.error is None else text.startswith(completion.text)
    assert len(failed) == 1 or kind != "eager"
    assert_idle(backend)
    assert_answers(backend.generate(prompts, params), prompts, params)


@pytest.mark.parametrize("kind", ["speculative", "dspark"])
def test_draft_model_that_raises_fails_the_requests_of_its_pass_and_the_backend_goes_on(monkeypatch, kind):
    backend = backend_of(kind)
    prompts, params, draft = random_prompts(5, seed=16), greedy(12), drafter_of("llama", kind)
    with monkeypatch.context() as patch:
        patch.setattr(draft, "forward", raise_at(draft.forward, 3))
        with pytest.raises(Fault, match="broken"):
            backend.generate(prompts, params, raise_on_error=True)
    assert_idle(backend)
    assert_answers(backend.generate(prompts, params), prompts, [params] * 5)


def test_one_warning_a_call_tells_how_many_requests_failed(recwarn):
    backend = backend_of("batched")
    backend.generate(["abc", "xyz"], greedy(5))
    assert len(recwarn) == 0
    for _ in range(2):
        with pytest.warns(UserWarning) as warned:
            backend.generate(["abc", [], "xyz", [999]], greedy(5))
        assert len(warned) == 1 and __file__ == warned[0].filename
        assert str(warned[0].message).startswith("2 of 4 requests were refused or failed")
        assert "of prompt 1: RequestError: Prompt 1 is empty" in str(warned[0].message)


def test_first_error_is_raised_before_anything_runs_where_it_is_asked_for():
    backend = backend_of("batched")
    for prompts in (["abc", [], [999]], [[]]):
        with pytest.raises(ValueError, match="empty"):
            backend.generate(prompts, greedy(5), raise_on_error=True)
    assert backend.stats.target_forwards == 0
    assert_idle(backend)
    assert_answers(backend.generate(["abc"], greedy(5), raise_on_error=True), ["abc"], [greedy(5)])


def test_refusal_tells_what_a_request_would_be_refused_with():
    backend = backend_of("batched", max_tokens_in_cache=100)
    assert backend.refusal("abc", greedy(5)) is None
    assert "`max_tokens_in_cache` is 100" in str(backend.refusal("abc", greedy(50)))
    assert "exceed the model's 256 positions" in str(backend.refusal("abc", greedy(256)))
    assert backend.stats.target_forwards == 0
    assert_idle(backend)


# What a completion tells


def test_peers_keep_a_backend_without_work_passing():
    backend, asked, passes = backend_of("batched"), [], []
    prompts, params = random_prompts(3, seed=18), greedy(6)

    def has_unfinished_peers(is_busy):
        asked.append(is_busy)
        return len(asked) <= 15

    hook = target_of().register_forward_pre_hook(lambda *args: passes.append(1))
    try:
        found = backend.generate(prompts, params, has_unfinished_peers)
    finally:
        hook.remove()
    assert_answers(found, prompts, [params] * 3)
    assert len(asked) == 16 and len(passes) == 15 and False in asked and asked == sorted(asked, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_of_completions_add_up_to_those_of_the_backend(kind):
    backend = backend_of(kind)
    found = backend.generate(random_prompts(6, seed=17), mixed_params(3, 6))
    total = sum((c.stats for c in found), DecodingStats())
    assert total.tokens == backend.stats.tokens == sum(len(c.token_ids) for c in found)
    assert total.rounds == backend.stats.rounds and total.accepted == backend.stats.accepted
    if kind in ("speculative", "dspark", "lookup"):
        assert sum(total.proposed.values()) > 0


def test_handler_of_an_openai_like_server():
    backend = backend_of("speculative")
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 15,
        "temperature": 0,
        "stop": ["e"],
        "logit_bias": {"10": 2},
        "stream": True,
    }
    params = from_openai(body)
    stream = backend.stream(body["messages"], params)
    text = "".join(stream)
    chat_ids = letters_tokenizer(adds_bos=False)("<bos>u hi.a ")["input_ids"]
    assert text == stream.completion.text == plain_text(chat_ids, params)[0]
