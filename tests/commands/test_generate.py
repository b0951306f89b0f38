"""Answers, and the statistics beside them."""

import builtins

import pytest

from hf_specgen.commands import generate
from hf_specgen.commands.runner import run
from tests.support.launching import report_of

SMALL = "--model small --max_new_tokens 8 --num_lookup_tokens 3 --stats".split()


def test_times_of_the_phases_stand_beside_the_wall_time(capsys):
    run("generate", ["--prompt", "one two three one two", *SMALL])
    report = report_of(capsys.readouterr().out)
    assert report["tokens"] == 8
    assert set(report["seconds"]) == {"draft", "verify", "processors", "other"}
    assert 0 < sum(report["seconds"].values()) <= report["wall_seconds"]
    assert report["tokens_per_second"] == pytest.approx(8 / report["wall_seconds"])
    assert 0 < report["target_forwards"] <= 8


def test_time_in_which_a_person_types_is_not_decoding_time(monkeypatch, capsys):
    read_clock, typing = generate.time.perf_counter, [0.0]
    turns = iter(["one two three", "and four", ""])

    def type_slowly(question):
        typing[0] += 1e6  # seconds
        return next(turns)

    monkeypatch.setattr(builtins, "input", type_slowly)
    monkeypatch.setattr(generate.time, "perf_counter", lambda: read_clock() + typing[0])
    run("generate", ["--chat", *SMALL])
    report = report_of(capsys.readouterr().out)
    assert report["tokens"] == 16
    assert 0 < sum(report["seconds"].values()) <= report["wall_seconds"] < 1e6
    assert report["tokens_per_second"] == pytest.approx(16 / report["wall_seconds"])


def test_a_chat_without_a_template_goes_on_from_what_was_said(monkeypatch, capsys):
    turns, prompts = iter(["one two", "three", ""]), []
    answer_to = generate.GenerationBackend.stream

    def look(self, prompt, *given):
        prompts.append(prompt)
        return answer_to(self, prompt, *given)

    monkeypatch.setattr(builtins, "input", lambda question: next(turns))
    monkeypatch.setattr(generate.GenerationBackend, "stream", look)
    run("generate", ["--chat", *SMALL])
    first_answer = capsys.readouterr().out.splitlines()[0]
    assert prompts[0] == "one two"
    assert prompts[1].startswith("one two\n") and prompts[1].endswith("\nthree")
    assert first_answer.strip() and first_answer[:3] in prompts[1]
