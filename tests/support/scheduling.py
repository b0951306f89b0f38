"""Decoders that keep a list of their passes, over models of several families and with all kinds of drafters."""

import functools

import torch

from hf_specgen import (
    CacheLimits,
    CausalLMDrafter,
    Decoder,
    DSparkDrafter,
    PromptLookupDrafter,
    Request,
)
from hf_specgen.layers.slot_cache import SlotLayer
from tests.support.decoding import plain_text, prompt
from tests.support.dspark_models import bigram_target, fitted_drafter
from tests.support.models import make_model, noisy_copy

FAMILIES = ["llama", "qwen3", "mistral", "gemma3", "gpt2"]
KINDS = ["draft", "lookup", "dspark", "plain"]


@functools.cache
def target_of(family):
    """Attention counts for little in it, so that its DSpark drafter is right at times."""
    if family != "gpt2":
        return bigram_target(family)
    model = make_model(family)
    with torch.no_grad():
        for layer in model.transformer.h:
            layer.attn.c_proj.weight.mul_(0.04)
    return model


@functools.cache
def dspark_of(family):
    return fitted_drafter(target_of(family))


@functools.cache
def draft_of(family):
    return noisy_copy(target_of(family))


def drafter_of(family, kind):
    makers = {
        "draft": lambda: CausalLMDrafter(draft_of(family), 4),
        "lookup": lambda: PromptLookupDrafter(4),
        "dspark": lambda: DSparkDrafter(dspark_of(family)),
        "plain": lambda: None,
    }
    return makers[kind]()


@functools.cache
def expected_text(family, prompt_ids, budget):
    return plain_text(target_of(family), Request(list(prompt_ids), budget))


def assert_plain(family, *requests):
    for number, request in enumerate(requests):
        assert request.finish_reason == "length"
        expected = expected_text(family, tuple(request.prompt_ids), request.max_new_tokens)
        assert (number, request.token_ids) == (number, expected)


class Watched:
    """A decoder that keeps a list of what it does: passes over prompts, and "round"."""

    def __init__(self, family="llama", kind="plain", slots=4, trace=False, **limits):
        self.decoder = Decoder(target_of(family), drafter_of(family, kind), slots, CacheLimits(**limits), trace=trace)
        self.scheduler = self.decoder._scheduler
        self.events = []
        next_pass, one_round = self.scheduler.next_pass, self.decoder._round

        def watched_pass():
            self.events.append(next_pass())
            return self.events[-1]

        def watched_round():
            self.events.append("round")
            return one_round()

        self.scheduler.next_pass, self.decoder._round = watched_pass, watched_round

    @property
    def passes(self):
        return [event for event in self.events if event != "round"]

    @property
    def num_fed(self):
        return sum(len(tokens) for event in self.passes for tokens in event.token_lists)

    def finish(self, *requests):
        self.decoder.add(*requests)
        while self.decoder.has_unfinished:
            self.decoder.step()
        return self


def chunked_requests():
    """Two that decode from the start, then long ones."""
    lengths = [(3, 40), (5, 36), (70, 12), (33, 16), (41, 9), (2, 20), (90, 5)]
    return [Request(prompt(length, seed=7 * length), budget) for length, budget in lengths]


def num_allocated(decoder, caches=slice(0, 1)):
    """Columns of the largest buffers over all rows."""
    layers = [
        layer for cache in decoder.rows.caches()[caches] for layer in cache.layers if isinstance(layer, SlotLayer)
    ]
    return max((layer.keys.shape[0] * layer.keys.shape[2] for layer in layers if layer.is_initialized), default=0)
