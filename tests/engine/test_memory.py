"""Processors with a memory: each row's text is that of a processor that saw its tokens alone, once each."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specgen import CausalLMDrafter, Decoder, DecodingRules, PromptLookupDrafter, Request, enable_speculation
from hf_specgen.engine.memory import Snapshot
from tests.support.models import PAD, left_padded, make_model, noisy_copy, ragged_lengths
from tests.support.processors import (
    CachesText,
    CoolsDown,
    ForbidsOnce,
    RemembersScores,
    SharesSeen,
    closure_with_memory,
)

KINDS = [CoolsDown, ForbidsOnce, RemembersScores, CachesText, closure_with_memory]


@pytest.fixture(scope="module")
def models():
    plain = make_model("llama")
    return plain, enable_speculation(copy.deepcopy(plain)), noisy_copy(plain, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("drafting", ["draft", "look-up"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_plain_generate_in_any_batch(models, kind, drafting):
    plain, ours, draft = models
    accepted = 0
    for seed in range(30):
        batch = left_padded(ragged_lengths((1, 2, 4)[seed % 3], seed), seed=seed)
        call = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": PAD, "eos_token_id": [2, 3, 9]}
        expected = plain.generate(**batch, **call, logits_processor=LogitsProcessorList([kind()]))
        extra = {"assistant_model": draft} if drafting == "draft" else {"prompt_lookup_num_tokens": 4}
        found = ours.generate(**batch, **call, **extra, logits_processor=LogitsProcessorList([kind()]))
        assert found.tolist() == expected.tolist(), seed
        accepted += sum(ours.speculation_stats.accepted.values())
    assert accepted > 20


def test_memory_is_left_as_plain_decoding_leaves_it(models):
    plain, ours, draft = models
    batch = left_padded([6])
    call = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    for kind in KINDS[:4]:
        expected, found = kind(), kind()
        plain.generate(**batch, **call, logits_processor=LogitsProcessorList([expected]))
        ours.generate(**batch, **call, assistant_model=draft, logits_processor=LogitsProcessorList([found]))
        for name, value in vars(expected).items():
            if kind is RemembersScores:
                torch.testing.assert_close(torch.stack(found.given), torch.stack(value))
            else:
                assert str(vars(found)[name]) == str(value)


def test_requests_that_share_a_processor_do_not_share_its_memory(models):
    plain, _, draft = models
    prompts = [[5, 9, 11], [7], [20, 21, 22, 23]]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        text = plain.generate(ids, max_new_tokens=12, eos_token_id=None, logits_processor=[CachesText()])
        expected.append(text[0, len(prompt) :].tolist())
    for drafter in (CausalLMDrafter(draft, 4), PromptLookupDrafter(3)):
        rules = DecodingRules(LogitsProcessorList([CachesText()]))
        requests = [Request(prompt, 12, rules) for prompt in prompts]
        for _ in Decoder(plain, drafter, max_batch_size=2).run(requests):
            pass
        assert [request.token_ids for request in requests] == expected


def test_memory_is_as_before_after_a_pass_that_failed(models):
    plain, _, draft = models
    ids = torch.tensor([[5, 9, 11]])
    expected = plain.generate(ids, max_new_tokens=12, eos_token_id=None, logits_processor=[CachesText()])[0, 3:]
    for number in (1, 2, 3):
        request = Request([5, 9, 11], 12, DecodingRules(LogitsProcessorList([CachesText()])))
        calls = itertools.count(1)

        def fails(*_, calls=calls, number=number):
            if next(calls) == number:
                raise LookupError("broken")

        decoder = Decoder(plain, CausalLMDrafter(draft, 4), on_round=fails)
        decoder.add(request)
        num_failed = 0
        while decoder.has_unfinished:
            try:
                decoder.step()
            except LookupError:
                num_failed += 1
        assert num_failed == 1 and request.token_ids == expected.tolist()


@pytest.mark.parametrize("drafting", ["draft", "look-up"])
def test_memory_that_mixes_rows_is_right_or_refused_by_name(models, drafting):
    plain, ours, draft = models
    num_refused = 0
    for seed in range(20):
        batch = left_padded(ragged_lengths((1, 2, 3)[seed % 3], seed), seed=seed)
        call = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
        expected = plain.generate(**batch, **call, logits_processor=LogitsProcessorList([SharesSeen()]))
        extra = {"assistant_model": draft} if drafting == "draft" else {"prompt_lookup_num_tokens": 4}
        try:
            found = ours.generate(**batch, **call, **extra, logits_processor=LogitsProcessorList([SharesSeen()]))
        except ValueError as error:
            assert "`SharesSeen` remembers what it was called with and mixes the rows of a batch" in str(error)
            assert len(batch["input_ids"]) > 1
            num_refused += 1
        else:
            assert found.tolist() == expected.tolist(), seed
    assert num_refused > 0 or drafting == "look-up"  # which finds nothing where nothing comes twice


class HoldsIterator(LogitsProcessor):
    def __init__(self):
        self.numbers = itertools.count()

    def __call__(self, input_ids, scores):
        return scores + next(self.numbers)


def test_memory_that_cannot_be_taken_back_is_refused_by_name(models):
    plain, ours, draft = models
    sentence = "`HoldsIterator` holds a `count`, whose state cannot be taken back"
    with pytest.raises(ValueError, match=sentence):
        ours.generate(**left_padded([4]), max_new_tokens=4, assistant_model=draft, logits_processor=[HoldsIterator()])
    request = Request([5], 4, DecodingRules(LogitsProcessorList([HoldsIterator()])))
    with pytest.raises(ValueError, match=sentence):
        Decoder(plain, PromptLookupDrafter(3)).add(request)
    for _ in Decoder(plain).run([request]):  # each token is judged once
        pass
    assert len(request.token_ids) == 4


class Everything:
    """An object that keeps state in all the ways in which one can."""

    seen: list[int] = []  # noqa: RUF012
    __slots__ = ("__dict__", "slot")

    def __init__(self):
        self.number, self.slot, self.text = 1, 2, "a"
        self.nested = {"list": [1, {"set": {1}}], "tuple": ([1],)}
        self.tensor, self.array = torch.zeros(3), np.zeros(3)
        self.generators = [torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1)]
        self.queue = __import__("collections").deque([1], maxlen=3)

    def __call__(self, input_ids, scores):
        return scores

    def change(self, what):
        {
            "number": lambda: setattr(self, "number", self.number + 1),
            "slot": lambda: setattr(self, "slot", 5),
            "text": lambda: setattr(self, "text", self.text + "b"),
            "attribute": lambda: setattr(self, "new", 1),
            "list": lambda: self.nested["list"].append(2),
            "set": lambda: self.nested["list"][1]["set"].add(2),
            "tuple": lambda: self.nested["tuple"][0].append(2),
            "tensor": lambda: self.tensor.add_(1),
            "array": lambda: self.array.__iadd__(1),
            "torch generator": lambda: torch.rand(1, generator=self.generators[0]),
            "random": lambda: self.generators[1].random(),
            "numpy generator": lambda: self.generators[2].random(),
            "deque": lambda: self.queue.append(2),
            "class": lambda: type(self).seen.append(1),
        }[what]()


@pytest.mark.parametrize(
    "what",
    ["number", "slot", "text", "attribute", "list", "set", "tuple", "tensor", "array", "torch generator", "random",
     "numpy generator", "deque", "class"],
)  # fmt: skip
def test_every_kind_of_state_is_seen_and_taken_back_in_place(what):
    processor = Everything()
    held = [processor.nested, processor.nested["list"], processor.tensor, processor.array, processor.queue]
    before = Snapshot(processor)
    assert before.is_current()
    processor.change(what)
    assert not before.is_current()
    after = Snapshot(processor)
    before.restore()
    assert before.is_current() and not after.is_current()
    assert held[0] is processor.nested and held[1] is processor.nested["list"] and held[2] is processor.tensor
    assert held[3] is processor.array and held[4] is processor.queue and Everything.seen == []
    after.restore()
    assert after.is_current()
    before.restore()
