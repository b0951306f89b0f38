"""Prompts of every kind become requests; a job tells what became of one."""

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import MinNewTokensLengthLogitsProcessor, PreTrainedTokenizerFast

from hf_specgen import UndecodableMask, from_openai
from hf_specgen.serving.prompt_encoder import PromptEncoder, eos_ids_of
from hf_specgen.serving.request_error import RequestError
from hf_specgen.serving.sampling_params import SamplingParams, mixed_seed
from tests.support.models import BOS, EOS, PAD, VOCAB_SIZE, character_tokenizer, make_model
from tests.support.tokenizers import TOKENIZER, ids_of, letters_tokenizer


def encoder(model=None, tokenizer=TOKENIZER, **settings):
    return PromptEncoder(make_model() if model is None else model, tokenizer, **settings)


def greedy(max_new_tokens=8, **settings):
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0, **settings)


# From prompts to requests


def test_kinds_of_prompts():
    encode = encoder().encode
    assert encode("hi") == ("hi", [BOS, *letters_tokenizer(False)("hi")["input_ids"]])
    assert encode([5, 6]) == encode((5, 6)) == ("cd", [5, 6])
    text, ids = encode([{"role": "user", "content": "hi"}])
    assert text == "<bos>u hi.a " and ids.count(BOS) == 1
    assert encode(ids_of("hi"))[0] == "<bos>hi"
    prompt_ids = [5, 6]
    encode(prompt_ids)[1].append(7)
    assert prompt_ids == [5, 6]


def test_samples_are_jobs_with_seeds_of_their_own():
    jobs = encoder().jobs("hi", SamplingParams(n=3, seed=2**32 - 2, max_new_tokens=9), index=4)
    assert [(job.index, job.sample, job.request.seed) for job in jobs] == [
        (4, sample, mixed_seed(2**32 - 2, sample)) for sample in range(3)
    ]
    assert len({id(job.text) for job in jobs}) == len({id(job.request.text) for job in jobs}) == 3
    assert [job.request.seed for job in encoder().jobs("hi", SamplingParams(n=2, max_new_tokens=9))] == [None, None]
    assert all(job.budget == 9 and not job.is_done for job in jobs)


def test_request_has_the_rules_of_its_params():
    params = greedy(stop_token_ids=[5], min_new_tokens=2, logprobs=3, stop=["ab"])
    (job,) = encoder().jobs("hi", params)
    rules = job.request.rules
    assert rules.eos_token_ids == {EOS, 5} and not rules.do_sample and job.request.num_logprobs == 3
    assert job.request.prompt_ids == ids_of("hi") and job.request.max_new_tokens == 8
    mask, least = rules.logits_processor
    assert type(mask) is UndecodableMask and type(least) is MinNewTokensLengthLogitsProcessor
    assert least.prompt_length_to_skip == 3
    (job,) = encoder().jobs("hi", SamplingParams(ignore_eos=True, max_new_tokens=9))
    assert job.request.rules.do_sample and job.request.rules.eos_token_ids == frozenset()


def test_mask_is_left_out_where_it_would_do_nothing():
    def masks(vocab_size, tokenizer=TOKENIZER, **settings):
        return encoder(make_model(vocab_size=vocab_size), tokenizer, **settings).masks

    assert len(masks(VOCAB_SIZE)) == len(masks(len(TOKENIZER))) == 1  # padding is never generated
    assert masks(VOCAB_SIZE, mask_undecodable=False) == []
    tokenizer = letters_tokenizer()
    tokenizer.pad_token = None
    assert masks(len(tokenizer), tokenizer) == [] and len(masks(VOCAB_SIZE, tokenizer)) == 1


def test_padding_that_ends_a_text_is_not_masked():
    tokenizer = letters_tokenizer()
    tokenizer.pad_token = "<eos>"
    (mask,) = encoder(tokenizer=tokenizer).masks
    scores = mask(None, torch.zeros(1, VOCAB_SIZE))
    assert scores[0, EOS] == 0 and scores[0, PAD] == 0 and scores[0, len(tokenizer) :].tolist() == [-float("inf")] * 4


def test_eos_of_the_generation_config_comes_before_the_tokenizers():
    model = make_model()
    assert eos_ids_of(model, TOKENIZER) == {EOS}
    model.generation_config.eos_token_id = [7, 9]
    assert eos_ids_of(model, TOKENIZER) == {7, 9}
    model.generation_config.eos_token_id = None
    assert eos_ids_of(model, TOKENIZER) == {EOS}
    tokenizer = letters_tokenizer()
    tokenizer.eos_token = None
    assert eos_ids_of(model, tokenizer) == frozenset()


@pytest.mark.parametrize("budget", [1, 100, 255])
def test_prompt_and_budget_fill_the_window_and_no_more(budget):
    fitting = [5] * (256 - budget)
    (job,) = encoder().jobs(fitting, greedy(budget))
    assert job.error is None and job.request.prompt_ids == fitting
    (job,) = encoder().jobs([5, *fitting], greedy(budget))
    assert (
        isinstance(job.error, RequestError)
        and job.error.code == "context_length_exceeded"
        and job.request is None
        and job.is_done
        and job.budget == 0
    )
    assert f"{257 - budget} tokens" in str(job.error) and "256 positions" in str(job.error)


def test_truncation_keeps_the_end_and_says_so():
    ids = list(range(3, 60)) * 6
    (job,) = encoder(truncate_prompt="left").jobs(ids, greedy(16))
    assert job.request.prompt_ids == ids[-240:] and job.prompt == TOKENIZER.decode(ids[-240:])
    (job,) = encoder(truncate_prompt="left").jobs("hi", greedy(16))
    assert job.request.prompt_ids == ids_of("hi") and job.prompt == "hi"
    (job,) = encoder(truncate_prompt="left").jobs("hi", greedy(256))
    assert "256" in str(job.error)


@pytest.mark.parametrize("prompt", ["", "hi", [5], [{"role": "user", "content": "hi"}]])
def test_refused_job_has_its_prompt_and_its_error(prompt):
    (job,) = encoder().jobs(prompt, None, index=3)
    completion = job.completion()
    assert completion.prompt == (prompt if isinstance(prompt, str) else "")
    assert (completion.text, completion.token_ids, completion.finish_reason, completion.index) == ("", (), "error", 3)
    assert isinstance(completion.error, TypeError) and completion.logprobs is None and completion.stats.tokens == 0
    assert job.take_piece() == ""


def test_ids_between_those_of_the_tokenizer_are_masked():
    tokenizer = character_tokenizer("abcdefgh")
    vocabulary = {"a": 0, "b": 3, "c": 9}
    gapped = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a")))
    for wanted, known in ((tokenizer, set(range(8))), (gapped, {0, 3, 9})):
        scores = torch.zeros(1, VOCAB_SIZE)
        for mask in PromptEncoder(make_model(), wanted).masks:
            scores = mask(torch.zeros(1, 1, dtype=torch.long), scores)
        assert set((scores[0] > -torch.inf).nonzero()[:, 0].tolist()) == known


@pytest.mark.parametrize("name, value", [("logit_bias", {VOCAB_SIZE: 5.0}), ("stop_token_ids", [VOCAB_SIZE])])
def test_ids_outside_the_vocabulary_are_refused_by_name(name, value):
    encoder = PromptEncoder(make_model(), character_tokenizer("abcdefgh"))
    (job,) = encoder.jobs("ab", SamplingParams(**{name: value}))
    assert f"`{name}` names [{VOCAB_SIZE}]" in str(job.error)


# What the chat template is told


def chat_encoder():
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}.{% endfor %}{{ tools[0]['function']['name'] if tools }}"
        "{{ documents[0]['text'] if documents }}{{ mood }}{% if add_generation_prompt %}!{% endif %}"
    )
    return encoder(tokenizer=tokenizer)


ASKED = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
LOOK = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "hi.!"),
        ({"tools": [LOOK]}, "hi.look!"),
        ({"documents": [{"title": "", "text": "page"}]}, "hi.page!"),
        ({"chat_template_kwargs": {"mood": "calm"}}, "hi.calm!"),
        ({"continue_final_message": True}, "hi"),
    ],
)
def test_settings_of_a_request_reach_the_chat_template(settings, text):
    (job,) = chat_encoder().jobs(ASKED, greedy(**settings))
    assert job.error is None and job.prompt == text
    body = {"max_tokens": 8, "temperature": 0, **settings}
    assert chat_encoder().jobs(ASKED, from_openai(body))[0].prompt == text
    if settings:
        (job,) = chat_encoder().jobs("hi", greedy(**settings))
        assert job.error.param == next(iter(settings)) and "no list of messages" in str(job.error)


@pytest.mark.parametrize("prompt", ["a\ud800", "\udfff", [{"role": "user", "content": "a\udcff"}]])
def test_half_of_a_surrogate_pair_is_named_with_its_place(prompt):
    (job,) = encoder().jobs(prompt, greedy(), index=3)
    assert isinstance(job.error, RequestError) and "half of a surrogate pair" in str(job.error)
    assert "Prompt 3" in str(job.error) and str(job.error).isascii()


def test_samples_share_what_remembers_nothing():
    jobs = encoder().jobs("hi", SamplingParams(n=3, frequency_penalty=1.0))
    assert len({id(job.request.rules) for job in jobs}) == 1
    assert len({id(job.text) for job in jobs}) == len({id(job.request) for job in jobs}) == 3
