"""What the drafter knows of each row: company, failures, rounds that do not end."""

import copy
import functools

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from hf_specgen import (
    Decoder,
    DecodingRules,
    DSparkDrafter,
    DSparkModel,
    Request,
    enable_speculation,
)
from hf_specgen.drafters import ConfidenceThreshold
from hf_specgen.engine.request import PaddedBatch
from tests.support.decoding import make_requests, plain_text, rules, run
from tests.support.dspark_models import HEADS, bigram_target, fitted_drafter
from tests.support.dspark_rounds import requests_for, tapped
from tests.support.models import (
    assert_partly_accepted,
    left_padded,
)
from tests.support.processors import Fails

BLOCK = 4


@pytest.fixture(scope="module")
def target():
    return bigram_target()


@pytest.fixture(scope="module")
def speculating(target):
    return enable_speculation(copy.deepcopy(target))


@pytest.fixture(scope="module")
def drafts(target):
    return {head: fitted_drafter(target, head) for head in HEADS}


@pytest.fixture(scope="module")
def draft(drafts):
    return drafts["gated"]


@pytest.mark.slow
@pytest.mark.parametrize(("head", "threshold"), [("vanilla", None), ("gated", 0.5), ("rnn", 0.5)])
def test_request_in_company_equals_itself_alone(target, drafts, head, threshold):
    policy = None if threshold is None else ConfidenceThreshold(threshold)

    def drafter():
        return DSparkDrafter(drafts[head], draft_length=policy)

    together, alone = make_requests(2), make_requests(2)
    stats = run(target, drafter(), together, slots=3)
    for request in alone:
        run(target, drafter(), [request], slots=1)
    for number, (request, other) in enumerate(zip(together, alone, strict=True)):
        assert (number, request.token_ids) == (number, other.token_ids)
        assert request.finish_reason == other.finish_reason
        has_scope = request.rules.logits_processor and getattr(request.rules.logits_processor[0], "scope", "")
        if not request.rules.do_sample and has_scope != "generated":
            assert (number, request.token_ids) == (number, plain_text(target, request))
    assert {request.rules.do_sample for request in together} == {True, False}
    assert_partly_accepted(stats)


@pytest.mark.parametrize("kind", ["raises", "masks"])
def test_failure_of_a_request_is_its_own(target, draft, kind):
    """A processor that fails at a candidate only ends its row if plain decoding reaches that place."""
    failing = [Request([5, 6, 7 + seed], 20, rules(Fails(length, kind))) for seed, length in enumerate((0, 9, 13))]
    never, others = [Request([8, 9, 10], 9, rules(Fails(12, kind)))], requests_for(4)
    stats = run(target, DSparkDrafter(draft), [*failing, *never, *others], slots=4)
    for request in failing:
        assert request.finish_reason == "error"
        assert ("no luck" if kind == "raises" else "`Fails` masked") in str(request.error)
        bare = plain_text(target, Request(request.prompt_ids, 20))
        assert request.token_ids == bare[: len(request.token_ids)]
    assert [len(request.token_ids) for request in failing] == [0, 6, 10]
    assert never[0].finish_reason == "length"
    for request in (*never, *others):
        assert request.token_ids == plain_text(target, Request(request.prompt_ids, request.max_new_tokens))
    assert_partly_accepted(stats)


@torch.no_grad()
def assert_context_is_whole(decoder: Decoder, target, model: DSparkModel, slots: list[int]) -> None:
    """The context keys and values of some slots are those of the committed tokens but the last, at their places."""
    cache = decoder.rows.draft_cache
    for slot in slots:
        request = decoder.rows.requests[slot]
        text = request.committed_from(0)[:-1]
        assert int(cache.lengths[slot]) == len(text)
        features = model.context_features(tapped(model, target, text))
        rotary = model.rotary_emb(torch.arange(len(text))[None], features.dtype)
        for layer, stored in zip(model.layers, cache.layers):
            keys, values = layer.self_attn.keys_values(features, rotary)
            torch.testing.assert_close(stored.keys[slot, :, : len(text)], keys[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(stored.values[slot, :, : len(text)], values[0], atol=1e-4, rtol=1e-4)


def test_context_is_that_of_the_committed_tokens(target, draft):
    requests = requests_for(8)
    decoder = Decoder(target, DSparkDrafter(draft), max_batch_size=3)
    for _ in decoder.run(requests):
        placed = [slot for slot, request in enumerate(decoder.rows.requests) if request and request.token_ids]
        assert_context_is_whole(decoder, target, draft, placed)
    assert_partly_accepted(decoder.stats)


class OutOfLuck(Exception):
    """What `failing_once` raises."""


def failing_once(function, call: int):
    """Raises at its `call`-th call, from 0, and then never again."""
    calls = []

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) == call + 1:
            raise OutOfLuck
        return function(*args, **kwargs)

    return wrapped


def go_on(decoder: Decoder, requests: list[Request], check) -> int:
    """Steps until all is done, through failures; returns their number."""
    decoder.add(*requests)
    num_failures = 0
    while decoder.has_unfinished:
        try:
            decoder.step()
        except OutOfLuck:
            num_failures += 1
            continue
        check()
    return num_failures


@pytest.mark.parametrize("place", ["on_round", "forward", "write_context", "unroll", "target"])
def test_failed_round_is_made_good(target, draft, monkeypatch, place):
    expected = [plain_text(target, request) for request in requests_for()]
    own, stats, num_failures = copy.deepcopy(target), [], 0
    for call in (0, 1, 2, 5):
        with monkeypatch.context() as patch:
            on_round = failing_once(lambda *args: None, call) if place == "on_round" else None
            decoder = Decoder(own, DSparkDrafter(draft), max_batch_size=3, on_round=on_round)
            handle = None
            if place == "target":
                handle = own.lm_head.register_forward_hook(failing_once(lambda *args: None, call))
            elif place != "on_round":
                patch.setattr(DSparkModel, place, failing_once(getattr(DSparkModel, place), call))
            requests = requests_for()

            def check(decoder=decoder):
                behind = decoder._scheduler.prefilling
                slots = [s for s, r in enumerate(decoder.rows.requests) if r and r.token_ids and s not in behind]
                assert_context_is_whole(decoder, target, draft, slots)

            num_failures += go_on(decoder, requests, check)
            if handle is not None:
                handle.remove()
        assert [request.token_ids for request in requests] == expected
        stats.append(decoder.stats)
    assert num_failures == 4
    assert_partly_accepted(*stats)


class FailingProcessor(LogitsProcessor):
    """Fails by accident, as a device may; nothing of that is in its memory, which is taken back with candidates."""

    judge = staticmethod(lambda scores: scores)

    def __init__(self, call: int):
        FailingProcessor.judge = staticmethod(failing_once(lambda scores: scores, call))

    def __call__(self, input_ids, scores):
        return FailingProcessor.judge(scores)


class FailingCriterion(StoppingCriteria):
    def __init__(self, call: int):
        self.judge = failing_once(lambda input_ids: torch.zeros(len(input_ids), dtype=torch.bool), call)

    def __call__(self, input_ids, scores, **kwargs):
        return self.judge(input_ids)


def decoded_with(shared: DecodingRules, target, draft) -> tuple[list[Request], Decoder, int]:
    """Requests of a padded batch with rules that fail once, their decoder, and how many rounds raised."""
    batch = left_padded([6, 2, 9])
    padded_batch = PaddedBatch(batch["input_ids"], 16)
    requests = [
        Request(ids[mask == 1].tolist(), 16, shared, batch=padded_batch, batch_row=row)
        for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"]))
    ]
    decoder = Decoder(target, DSparkDrafter(draft), max_batch_size=3)
    return requests, decoder, go_on(decoder, requests, lambda: None)


@pytest.fixture(scope="module")
def texts(target):
    return target.generate(**left_padded([6, 2, 9]), max_new_tokens=16, eos_token_id=-1)[:, 9:].tolist()


def test_failure_of_a_shared_criterion_is_made_good(target, draft, texts):
    stats, num_failures = [], 0
    for call in (0, 2, 3, 5, 9, 14):
        shared = DecodingRules(stopping_criteria=StoppingCriteriaList([FailingCriterion(call)]))
        requests, decoder, raised = decoded_with(shared, target, draft)
        num_failures += raised
        assert [request.token_ids for request in requests] == texts
        stats.append(decoder.stats)
    assert num_failures >= 2
    assert_partly_accepted(*stats)


def test_failure_of_a_shared_processor_ends_its_requests_or_a_block(target, draft, texts):
    """It is raised where the target's scores are judged; in drafting it only ends the block."""
    num_failures, num_whole, stats = 0, 0, []
    for call in range(12):
        shared = DecodingRules(LogitsProcessorList([FailingProcessor(call)]))
        requests, decoder, raised = decoded_with(shared, target, draft)
        num_failures += raised > 0
        for request, text in zip(requests, texts):
            has_failed = request.finish_reason == "error"
            assert request.token_ids == (text[: len(request.token_ids)] if has_failed else text)
        assert any(request.finish_reason == "error" for request in requests) == (raised > 0)
        if not raised:
            num_whole += 1
            stats.append(decoder.stats)
    assert num_failures >= 2 and num_whole >= 2
    assert_partly_accepted(*stats)


def test_seeded_rows_go_on_as_if_a_failed_round_had_not_been(target, draft, monkeypatch):
    def sampled() -> list[Request]:
        return [Request([5 + row, 9, 7], 24, rules(do_sample=True), seed=row) for row in range(3)]

    expected, num_failures = sampled(), 0
    stats = run(target, DSparkDrafter(draft), expected, slots=3)
    assert_partly_accepted(stats)
    for place in ("forward", "write_context", "unroll"):
        for call in (0, 1, 2, 5):
            with monkeypatch.context() as patch:
                patch.setattr(DSparkModel, place, failing_once(getattr(DSparkModel, place), call))
                requests = sampled()
                decoder = Decoder(target, DSparkDrafter(draft), max_batch_size=3)
                num_failures += go_on(decoder, requests, lambda: None)
            assert [r.token_ids for r in requests] == [r.token_ids for r in expected], (place, call)
    assert num_failures >= 9
