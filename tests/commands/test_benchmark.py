"""What the benchmark reports, and what is left of it when it does not come to its end."""

import json
from dataclasses import replace

import pytest

from hf_specgen.commands import models
from hf_specgen.commands.benchmark import command, evaluation_cases, measuring
from hf_specgen.commands.benchmark.measuring import Measurement, Repeat, Runner, Setting, measure, total_of
from hf_specgen.commands.runner import run
from tests.support.launching import report_of, start_script

SMALL = (
    "--model small --max_prompt_tokens 16 --max_new_tokens 8 --repeats 1 --batch_sizes 1 2 --draft_noise 0.3".split()
)
CASES = "--cases speculation ragged batching overhead".split()
MEASURED = ("speculation", "ragged", "batching")
SETTING = Setting(None, [[1]], {}, repeats=2, pad_token_id=0, is_main=False)


@pytest.mark.slow
def test_ids_are_equal_and_the_report_is_in_the_last_line_and_in_the_file(capsys, tmp_path):
    file = tmp_path / "new" / "report.json"
    run("benchmark", [*SMALL, *CASES, "--prompt_limit", "3", "--output", str(file)])
    report = report_of(capsys.readouterr().out)
    assert report == json.loads(file.read_text())
    assert [path.name for path in file.parent.iterdir()] == ["report.json"]
    assert report["settings"]["num_assistant_tokens"] == 5
    assert report["environment"]["num_processes"] == 1
    for case in MEASURED:
        for line in report[case]:
            assert line["num_equal"] == line["num_prompts"] == 3, f"{case}: {line['name']}"
    speculative = [line for line in report["speculation"] if line["name"] == "speculative"]
    assert [line["batch_size"] for line in speculative] == [1, 2]
    for line in speculative:
        assert line["tokens"] == line["stats"]["tokens"] == 24
        assert line["stats"]["drafting_rounds"] > 0
    assert 0 < report["overhead"]["processors_verification_bookkeeping_share"] < 1


def test_sampled_ids_are_not_compared(capsys):
    run("benchmark", [*SMALL, *"--batch_sizes 1 --prompt_limit 1 --do_sample --temperature 0.8".split()])
    printed = capsys.readouterr().out
    assert {line["num_equal"] for line in report_of(printed)["speculation"]} == {None}
    assert "1/1" not in printed


@pytest.mark.distributed
@pytest.mark.parametrize("prompt_limit", [1, 3])
def test_two_processes_are_added_up(prompt_limit):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    cases = ["--cases", "speculation", "overhead"] if prompt_limit == 3 else CASES
    done = start_script("benchmark", *SMALL, *cases, "--prompt_limit", str(prompt_limit), launcher=launcher)
    assert done.returncode == 0, done.stderr[-4000:]
    report = report_of(done.stdout)
    lines = done.stdout.splitlines()
    assert sum(line.startswith("{") for line in lines) == 1
    assert sum(line.strip() == "speculation" for line in lines) == 2, "one table per batch size"
    assert report["environment"]["num_processes"] == 2
    for case in MEASURED:
        for line in report.get(case, []):
            assert line["num_equal"] == line["num_prompts"] == prompt_limit, f"{case}: {line['name']}"
    for line in report["speculation"]:
        assert line["tokens"] == 8 * prompt_limit
        assert line["speedup"] > 0
        if line["name"] == "speculative":
            assert line["stats"]["tokens"] == 8 * prompt_limit
    assert report["overhead"]["processors_verification_bookkeeping_share"] > 0


@pytest.mark.slow
def test_evaluation_generates_the_same_texts_each_way(monkeypatch):
    monkeypatch.setattr(evaluation_cases, "NUM_PROMPTS", 4)
    monkeypatch.setattr(evaluation_cases, "NUM_NEW_TOKENS", 6)
    prompts = evaluation_cases.evaluation_prompts(64)
    assert len({prompt[:20] for prompt in prompts}) == 64, "ours prefills common beginnings once"
    model, tokenizer = models.load_model("small")
    result = evaluation_cases.evaluation_case(Setting(model, [], {}, repeats=1, pad_token_id=0), tokenizer)
    assert result["num_equal"] == dict.fromkeys(["padded generate", "callback, batched", "callback, speculative"], 4)
    assert all(seconds > 0 for seconds in result["seconds"].values())


def line_of(*repeats: Repeat, **values) -> Measurement:
    return Measurement("any", batch_size=1, repeats=repeats, num_prompts=1, num_equal=None, **values)


def test_tokens_belong_to_the_time_in_which_they_came():
    slow, fast = Repeat(40, 0.040), Repeat(10, 0.010)
    for repeats in ([slow, fast], [fast, slow], [fast, slow, fast], [slow, slow, fast]):
        assert line_of(*repeats).to_dict()["tokens_per_second"] == pytest.approx(1000)
    uneven = line_of(Repeat(10, 1.0), Repeat(90, 3.0), Repeat(40, 2.0))
    entry = uneven.to_dict()
    assert (entry["tokens"], entry["seconds"], entry["tokens_per_second"]) == (40, 2.0, 20.0)
    assert entry["all_tokens"] == [10, 90, 40] and entry["all_seconds"] == [1.0, 3.0, 2.0]


def test_decoding_alone_is_measured_within_one_repeat():
    line = line_of(Repeat(41, 0.050, 0.010), Repeat(11, 0.012, 0.002), Repeat(21, 0.025, 0.005))
    assert line.decode_tokens_per_second == pytest.approx(1000)


def test_processes_are_added_up_per_repeat():
    here = line_of(Repeat(30, 0.03, 0.01), Repeat(10, 0.01, 0.01))
    there = line_of(Repeat(10, 0.02, 0.02), Repeat(10, 0.02, 0.005))
    without_prompts = replace(line_of(Repeat(0, 0.001), Repeat(0, 0.001)), num_prompts=0)
    total = total_of((here, there, without_prompts))
    assert total.repeats == (Repeat(40, 0.03, 0.02), Repeat(20, 0.02, 0.01))
    assert total.num_prompts == 2


def interrupting(at: int) -> Runner:
    """Makes one token a run, until somebody presses Ctrl-C."""
    calls = []

    def once():
        calls.append(at)
        if len(calls) == at:
            raise KeyboardInterrupt
        return [[7]], None

    return Runner("any", once)


def test_an_interruption_keeps_the_repeats_that_were_finished():
    runners = [Runner("first", lambda: ([[7]], None)), interrupting(at=3)]
    with pytest.raises(measuring.Interrupted) as caught:
        measure(runners, SETTING, batch_size=1)
    assert [len(line.repeats) for line in caught.value.lines] == [2, 1]
    with pytest.raises(KeyboardInterrupt) as caught:
        measure([Runner("first", lambda: ([[7]], None)), interrupting(at=2)], SETTING, batch_size=1)
    assert not isinstance(caught.value, measuring.Interrupted), "nothing is measured yet"


@pytest.fixture
def speculation(monkeypatch):
    """Stands in for the first case: what it finds is certain, and comes at once."""
    lines = [line_of(Repeat(10, 0.01))]
    monkeypatch.setattr(command, "speculation_case", lambda *given: lines)
    return lines


def test_a_failing_case_keeps_what_the_others_find(monkeypatch, capsys, tmp_path, speculation):
    def fail(*given):
        raise RuntimeError("the kernel\nis not there")

    monkeypatch.setattr(command, "ragged_case", fail)
    monkeypatch.setattr(command, "processors_case", lambda repeats: {"as_processor": 1.5})
    file = tmp_path / "report.json"
    with pytest.raises(SystemExit) as ended:
        run("benchmark", [*SMALL, "--cases", "speculation", "ragged", "processors", "--output", str(file)])
    assert ended.value.code == 1
    printed = capsys.readouterr()
    report = json.loads(file.read_text())
    assert report == report_of(printed.out)
    assert [line["batch_size"] for line in report["speculation"]] == [1, 1]
    assert report["processors"] == {"as_processor": 1.5}
    assert report["failed"] == {"ragged": "RuntimeError: the kernel is not there"}
    assert "error: the case 'ragged' failed: RuntimeError: the kernel is not there\n" in printed.err


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), measuring.Interrupted([line_of(Repeat(20, 0.01))])])
def test_an_interruption_keeps_what_is_measured(monkeypatch, capsys, tmp_path, speculation, interruption):
    def stop(*given):
        raise interruption

    monkeypatch.setattr(command, "ragged_case", stop)
    file = tmp_path / "report.json"
    with pytest.raises(SystemExit) as ended:
        run("benchmark", [*SMALL, "--cases", "speculation", "ragged", "processors", "--output", str(file)])
    assert ended.value.code == 130
    printed = capsys.readouterr()
    report = json.loads(file.read_text())
    assert report == report_of(printed.out)
    assert len(report["speculation"]) == 2 and "processors" not in report
    lines = [line["tokens_per_second"] for line in report.get("ragged", [])]
    assert lines == ([2000] if isinstance(interruption, measuring.Interrupted) else [])
    assert printed.err.splitlines()[-1] == "interrupted"


def test_a_result_is_in_the_file_before_the_next_case_begins(monkeypatch, tmp_path, speculation):
    file, seen = tmp_path / "report.json", []

    def look(*given):
        seen.append(json.loads(file.read_text()))
        return {"as_processor": 1.5}

    monkeypatch.setattr(command, "processors_case", look)
    run("benchmark", [*SMALL, "--cases", "speculation", "processors", "--output", str(file)])
    assert len(seen[0]["speculation"]) == 2, "a kill would have left this"
