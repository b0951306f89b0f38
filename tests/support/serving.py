"""Backends over letters, the texts that plain `generate` gives instead, and models that fail."""

import dataclasses
import functools
import itertools
import random

import torch
from transformers import LogitsProcessorList

from hf_specgen import UndecodableMask, get_generation_backend
from hf_specgen.serving.sampling_params import SamplingParams
from tests.support.dspark_models import bigram_target, fitted_drafter
from tests.support.models import EOS, PAD, assert_partly_accepted, make_model, noisy_copy
from tests.support.sampling import extra_processors, generation_config
from tests.support.tokenizers import LETTERS, NUM_TOKENS, TOKENIZER, ids_of

KINDS = ["eager", "batched", "lookup", "speculative", "dspark"]


def target_of(family="llama"):
    """Its text is varied, ends at times, and a DSpark drafter can learn some of it."""
    return _target_of(family)


@functools.cache
def _target_of(family):
    return make_model(family) if family in ("gpt2", "opt") else bigram_target(family)


@functools.cache
def drafter_of(family, kind):
    return noisy_copy(target_of(family)) if kind == "speculative" else fitted_drafter(target_of(family))


def backend_of(kind, family="llama", **settings):
    name = "speculative" if kind == "lookup" else kind
    if kind in ("speculative", "dspark"):
        settings = {"draft_model": drafter_of(family, kind), "num_assistant_tokens": 3, **settings}
    return get_generation_backend(name, target_of(family), TOKENIZER, **settings)


def assert_speculates(kind, *backends):
    stats = [backend.stats for backend in backends]
    if kind in ("eager", "batched"):
        assert all(one.drafting_rounds == 0 and one.tokens > 0 for one in stats)
    else:
        assert_partly_accepted(*stats)


def mask():
    return UndecodableMask(NUM_TOKENS, PAD, EOS)


def plain_ids(text, params, family="llama"):
    """What plain `generate` makes of one prompt, alone and without padding."""
    return list(_plain_ids(tuple(ids_of(text) if isinstance(text, str) else text), params, family))


@functools.cache
def _plain_ids(ids, params, family):
    model, prompt_ids = target_of(family), torch.tensor([ids])
    config = generation_config(params, [EOS], PAD)
    extra = LogitsProcessorList([*extra_processors(params, prompt_ids.shape[1]), mask()])
    generated = model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        generation_config=config,
        logits_processor=extra,
        tokenizer=TOKENIZER if params.stop else None,
    )
    return tuple(generated[0, len(ids) :].tolist())


def plain_text(text, params, family="llama"):
    """
    And its text: stop strings count in what is generated only, and behind the least length, so they are looked for by
    hand, one token (a letter here) after the other. What ends the text is no part of it.
    """
    ids = plain_ids(text, dataclasses.replace(params, stop=()), family)
    whole = [TOKENIZER.decode(ids[:n], skip_special_tokens=True) for n in range(len(ids) + 1)]
    for count, now in enumerate(whole):
        found = [len(now) - len(stop) for stop in params.stop if now.endswith(stop)]
        if found and count > params.min_new_tokens and ids[count - 1] not in params.stop_ids([EOS]):
            return now[: min(found)], ids[:count]
    return whole[-2 if ids[-1] in params.stop_ids([EOS]) else -1], ids


def random_prompts(count, seed=0, longest=14):
    generator = random.Random(seed)
    return ["".join(generator.choices(LETTERS, k=generator.randint(1, longest))) for _ in range(count)]


def greedy(max_new_tokens=24, **settings):
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=0, **settings)


def assert_answers(completions, prompts, params, family="llama"):
    for number, (completion, prompt, own) in enumerate(zip(completions, prompts, params, strict=True)):
        text, ids = plain_text(prompt, own, family)
        assert (number, completion.text, list(completion.token_ids)) == (number, text, ids)
        assert (completion.index, completion.sample, completion.error) == (number, 0, None)
        assert completion.prompt == prompt


class Fault(Exception):
    pass


def raise_at(function, number):
    """`function`, but its call of that number raises."""
    calls = itertools.count(1)

    def failing(*args, **kwargs):
        if next(calls) == number:
            raise Fault("broken")
        return function(*args, **kwargs)

    return failing


def mixed_params(seed=0, count=16):
    """Budgets, penalties, stops, seeds: no two alike."""
    generator = random.Random(seed)
    made = []
    for number in range(count):
        settings = {
            "max_new_tokens": generator.randint(1, 24),
            "temperature": generator.choice([0.0, 0.8, 1.5]),
            "top_k": generator.choice([0, 5, 20]),
            "top_p": generator.choice([1.0, 0.9]),
            "min_p": generator.choice([0.0, 0.05]),
            "repetition_penalty": generator.choice([1.0, 1.3]),
            "frequency_penalty": generator.choice([0.0, 0.7]),
            "presence_penalty": generator.choice([0.0, -0.4]),
            "logit_bias": generator.choice([None, {7: 2.0}, {"9": -5}]),
            "stop": generator.choice([(), ("e",), ("qu", "x", "AB")]),
            "stop_token_ids": generator.choice([(), (33, 34)]),
            "ignore_eos": generator.choice([False, True]),
            "seed": number + 300,
        }
        made.append(SamplingParams(**settings))
    return made
