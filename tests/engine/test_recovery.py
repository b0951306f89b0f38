"""A decoder goes on after a pass that failed as if it had not been made."""

import traceback
import weakref

import pytest
import torch
from transformers import LogitsProcessor

from hf_specgen import (
    CausalLMDrafter,
    Decoder,
    FrequencyPenalty,
    Request,
)
from tests.support.decoding import prompt, rules, run
from tests.support.scheduling import KINDS, Watched, assert_plain, draft_of, target_of


class Fault(Exception):
    pass


def fails_once(function, at):
    """`function`, but its call number `at` raises; before it does anything, or after."""
    calls = []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == at[0] and at[1] == "before":
            raise Fault
        result = function(*args, **kwargs)
        if len(calls) == at[0]:
            raise Fault
        return result

    return failing


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("kind", "place"),
    [("plain", "forward"), *((k, p) for k in KINDS if k != "plain" for p in ("forward", "observe", "draft"))],
)
def test_decoding_goes_on_after_a_pass_that_failed(monkeypatch, kind, place, when):
    """At each of the first passes in turn: the prompts' chunks and the rounds between them."""
    target = target_of("llama")
    num_failed = 0
    for at in (1, 2, 5, 8, 12):
        requests = [Request(prompt(3, 1), 30), Request(prompt(1, 5), 10), Request(prompt(50, 2), 9)]
        requests.append(Request([*requests[2].prompt_ids[:40], *prompt(9, 3)], 9))
        watched = Watched("llama", kind, slots=4, prefill_chunk_size=8)
        owner, name = {"forward": (target, "forward")}.get(place, (watched.decoder.drafter, place))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails_once(getattr(owner, name), (at, when)))
            watched.decoder.add(requests[0])
            to_come = requests[1:]
            while watched.decoder.has_unfinished or to_come:
                try:
                    watched.decoder.step()
                except Fault:
                    num_failed += 1
                if to_come:
                    watched.decoder.add(to_come.pop(0))
        assert_plain("llama", *requests)
        assert watched.decoder.rows.cache.lengths.tolist() == [0] * 4
    assert num_failed >= 4


def test_sampled_text_is_its_seeds_after_a_chunk_that_failed(monkeypatch):
    target = target_of("llama")

    def sampled():
        return Request(prompt(50, 2), 9, rules(FrequencyPenalty(0.5), do_sample=True), seed=3)

    expected, company, failed = sampled(), Request(prompt(3, 1), 30), sampled()
    run(target, None, [expected])
    watched = Watched(slots=2, prefill_chunk_size=8)
    watched.decoder.add(company)
    watched.decoder.step()
    watched.decoder.add(failed)
    with monkeypatch.context() as patch:
        patch.setattr(target, "forward", fails_once(target.forward, (5, "after")))
        with pytest.raises(Fault):
            watched.finish()
    assert failed.token_ids == []
    watched.finish()
    assert failed.token_ids == expected.token_ids
    assert_plain("llama", company)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("kind", "place"),
    [("plain", "forward"), *((k, p) for k in KINDS if k != "plain" for p in ("forward", "observe", "draft"))],
)
def test_sampled_text_is_its_seeds_whichever_pass_failed(monkeypatch, kind, place, when):
    """Numbers for drafting and verification come again, and so does the width of a block."""
    target = target_of("llama")

    def sampled():
        settings = {"do_sample": True, "eos_token_ids": frozenset()}
        return [Request(prompt(20, i), 14, rules(FrequencyPenalty(0.5), **settings), seed=i) for i in range(2)]

    expected = Watched("llama", kind, prefill_chunk_size=8)
    wanted = sampled()
    expected.finish(*wanted)
    num_failed = 0
    for at in (1, 2, 3, 4, 6, 8):
        watched, requests = Watched("llama", kind, prefill_chunk_size=8), sampled()
        owner, name = {"forward": (target, "forward")}.get(place, (watched.decoder.drafter, place))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails_once(getattr(owner, name), (at, when)))
            watched.decoder.add(*requests)
            while watched.decoder.has_unfinished:
                try:
                    watched.decoder.step()
                except Fault:
                    num_failed += 1
        assert [request.token_ids for request in requests] == [request.token_ids for request in wanted], at
    assert num_failed >= 3


@pytest.mark.parametrize("failing_pass", [None, 2, 9, 14])
def test_heuristic_schedule_goes_on_as_if_a_failed_round_had_not_been(monkeypatch, failing_pass):
    target = target_of("llama")

    def text(failing_round, failing_pass=None):
        request = Request(prompt(6, 1), 40, rules(do_sample=True), seed=5)
        drafter = CausalLMDrafter(draft_of("llama"), 3, schedule="heuristic")
        rounds = []

        def fails(rows, candidates, verification):
            rounds.append(int(candidates.lengths[0]))
            if len(rounds) == failing_round:
                raise Fault

        decoder = Decoder(target, drafter, on_round=fails)
        decoder.add(request)
        with monkeypatch.context() as patch:
            patch.setattr(drafter.model, "forward", fails_once(drafter.model.forward, (failing_pass, "after")))
            while decoder.has_unfinished:
                try:
                    decoder.step()
                except Fault:
                    if failing_round == len(rounds):
                        rounds.pop()
                        failing_round = None
        return request.token_ids, rounds

    expected = text(None)
    assert len(set(expected[1])) > 3
    for failing_round in (1, 2, 4, 7):
        assert text(failing_round, failing_pass) == expected


class FailsLate(LogitsProcessor):
    def __init__(self):
        self.kept = []

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 6:
            held = torch.zeros(1000)
            self.kept.append(weakref.ref(held))
            raise LookupError("no opinion")
        return scores


def test_error_of_a_request_holds_no_tensor_of_its_pass():
    processor = FailsLate()
    request = Request([5, 6, 7], 20, rules(processor))
    run(target_of("llama"), None, [request])
    assert (request.finish_reason, len(request.token_ids)) == ("error", 4)
    assert processor.kept[-1]() is None
    assert "FailsLate" not in "".join(traceback.format_exception(request.error))
    assert "raise LookupError" in "".join(traceback.format_exception(request.error))
    frames = [frame for frame, _ in traceback.walk_tb(request.error.__traceback__)]
    assert frames and not any(isinstance(v, torch.Tensor) for frame in frames for v in frame.f_locals.values())
