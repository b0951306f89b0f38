"""The example as a user starts it: what it prints, keeps and draws."""

import importlib
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.commands.test_commands import report_of, start

NAME = "train_with_generation_eval"
SHORT = "--max_steps 20 --eval_steps 10 --num_prompts 7 --num_shown 1 --plot".split()


@pytest.fixture
def script(monkeypatch):
    return importlib.import_module(f"hf_specgen.commands.{NAME}")


def texts_at(folder: Path, step: int, name: str = "eval") -> list[dict]:
    with (folder / "completions" / f"{name}_step_{step:08d}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"max_steps": 50, "eval_steps": 20}, "`max_steps` has to be a multiple of `eval_steps`.* 50 and 20"),
        ({"eval_steps": 0}, "`max_steps` has to be a multiple of `eval_steps`"),
        ({"num_prompts": 0}, "`num_prompts` has to be between 1 and 7999, but is 0"),
        ({"num_prompts": 8000}, "`num_prompts` has to be between 1 and 7999, but is 8000"),
        ({"backend": "dspark"}, "`backend` has to be 'eager', 'batched' or 'speculative', but is 'dspark'"),
    ],
    ids=str,
)
def test_arguments_that_cannot_work_are_refused(script, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        script.TrainArguments(**arguments, plot="")


def test_a_plot_needs_matplotlib(script, monkeypatch):
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="`plot` needs matplotlib"):
        script.TrainArguments()
    script.TrainArguments(plot="")


def test_texts_are_dates_and_none_is_there_twice(script):
    texts = script.make_texts(seed=0)
    assert texts == script.make_texts(seed=0) != script.make_texts(seed=1)
    assert len(texts) == len({text["completion"] for text in texts}) == script.NUM_TEXTS
    by_date = {text["completion"]: text["prompt"] for text in script.make_texts(seed=0)}
    for completion, prompt in by_date.items():
        year, _, day = completion.strip().split("-")
        assert prompt.endswith(" is") and year in prompt and str(int(day)) in prompt
    ordinals = {prompt.split(" of ")[0] for prompt in by_date.values() if " of " in prompt}
    assert {"1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "23rd"} <= ordinals
    assert not ordinals & {"11st", "12nd", "13rd"}


@pytest.mark.distributed
def test_two_processes_share_the_prompts(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    report = report_of(start(NAME, "--output_dir", str(tmp_path), *SHORT, "", launcher=launcher))
    assert report["num_processes"] == 2
    assert report["best_step"] in (10, 20)
    assert report["loaded"]["exact_match"] == report["best_exact_match"]
    for step in (0, 10, 20):
        assert [text["index"] for text in texts_at(tmp_path, step)] == list(range(7))


@pytest.mark.slow
def test_texts_get_better_and_the_best_model_is_loaded(tmp_path):
    plot = "curves.png" if find_spec("matplotlib") else ""
    done = start(NAME, "--output_dir", str(tmp_path), "--max_steps", "240", "--plot", plot)
    report = report_of(done)
    right = {
        step: sum(text["completion"] == text["reference"] for text in texts_at(tmp_path, step)) / 128
        for step in range(0, 241, 40)
    }
    print(f"\nright dates by step: {right}")
    assert right[0] == 0.0
    assert report["best_exact_match"] == max(right.values()) == right[report["best_step"]] > 0.2
    loaded = texts_at(tmp_path, 240, "best")
    assert loaded != texts_at(tmp_path, 0)
    assert [text["completion"] for text in loaded] == [
        text["completion"] for text in texts_at(tmp_path, report["best_step"])
    ]
    assert f"eval, step {report['best_step']}" in done.stdout
    if plot:
        assert (tmp_path / plot).read_bytes().startswith(b"\x89PNG")
