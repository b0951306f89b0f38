"""Requests of a decoder, and what plain `generate` makes of them."""

import random

import torch
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specgen import (
    Decoder,
    DecodingRules,
    FrequencyPenalty,
    LogitBias,
    RepetitionPenalty,
    Request,
    TokenPenalties,
)
from tests.support.criteria import EndsWithOneOf
from tests.support.models import EOS, VOCAB_SIZE

WARPERS = [TemperatureLogitsWarper(2.0), TopKLogitsWarper(12), TopPLogitsWarper(0.95)]


def rules(*processors, criteria=(), **settings):
    processors = LogitsProcessorList(processors)
    return DecodingRules(processors, StoppingCriteriaList(criteria), **settings)


def prompt(length, seed):
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def make_requests(num_copies=1):
    """Requests that have little in common; every call makes them anew."""
    kinds = [
        (rules(), 24, None),
        (rules(FrequencyPenalty(1.5)), 9, None),
        (rules(RepetitionPenalty(1.4), LogitBias({"12": 1.0}), eos_token_ids=frozenset([EOS, 19, 51])), 30, None),
        (rules(*WARPERS, do_sample=True), 20, 7),
        (rules(TokenPenalties(1.2, 0.5, 0.5, scope="generated"), *WARPERS, do_sample=True), 17, 8),
        (rules(NoRepeatNGramLogitsProcessor(2)), 25, None),
        (rules(FrequencyPenalty(2.0), criteria=[EndsWithOneOf(10, 32, 57)]), 30, None),
        (rules(), 1, None),
        (rules(*WARPERS[:1], criteria=[EndsWithOneOf(25)], do_sample=True, eos_token_ids=frozenset([28])), 40, 9),
        (rules(), 2, None),
    ]
    return [
        Request(prompt(1 + 3 * index % 13, seed=index + 100 * copy_index), budget, rules_, seed)
        for copy_index in range(num_copies)
        for index, (rules_, budget, seed) in enumerate(kinds)
    ]


def run(model, drafter, requests, slots=3, **settings):
    decoder = Decoder(model, drafter, max_batch_size=slots, **settings)
    for _ in decoder.run(requests):
        pass
    return decoder.stats


def plain_text(model, request):
    """What plain `generate` makes of a greedy request."""
    ids = torch.tensor([request.prompt_ids])
    settings = {
        "attention_mask": torch.ones_like(ids),
        "logits_processor": LogitsProcessorList(request.rules.logits_processor),
        "stopping_criteria": request.rules.stopping_criteria,
        "eos_token_id": list(request.rules.eos_token_ids) or -1,
    }
    return model.generate(ids, max_new_tokens=request.max_new_tokens, **settings)[0, ids.shape[1] :].tolist()
