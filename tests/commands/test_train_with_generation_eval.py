"""The example as a user starts it: what it prints, keeps and draws."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from hf_specgen.commands import train_with_generation_eval as command
from hf_specgen.commands.options.train_with_generation_eval import NUM_TEXTS
from tests.support.launching import report_of, start_script

NAME = "train_with_generation_eval"
SHORT = "--max_steps 20 --eval_steps 10 --num_prompts 7 --num_shown 1 --plot".split()


def texts_at(folder: Path, step: int, name: str = "eval") -> list[dict]:
    with (folder / "completions" / f"{name}_step_{step:08d}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_texts_are_dates_and_none_is_there_twice():
    texts = command.make_texts(seed=0)
    assert texts == command.make_texts(seed=0) != command.make_texts(seed=1)
    assert len(texts) == len({text["completion"] for text in texts}) == NUM_TEXTS
    by_date = {text["completion"]: text["prompt"] for text in texts}
    for completion, prompt in by_date.items():
        year, _, day = completion.strip().split("-")
        assert prompt.endswith(" is") and year in prompt and str(int(day)) in prompt
    ordinals = {prompt.split(" of ")[0] for prompt in by_date.values() if " of " in prompt}
    assert {"1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "23rd"} <= ordinals
    assert not ordinals & {"11st", "12nd", "13rd"}


@pytest.mark.distributed
def test_two_processes_share_the_prompts(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = start_script(NAME, "--output_dir", str(tmp_path), *SHORT, "", launcher=launcher)
    assert done.returncode == 0, done.stderr[-4000:]
    report = report_of(done.stdout)
    assert report["num_processes"] == 2
    assert report["best_step"] in (10, 20)
    assert report["loaded"]["exact_match"] == report["best_exact_match"]
    for step in (0, 10, 20):
        assert [text["index"] for text in texts_at(tmp_path, step)] == list(range(7))


@pytest.mark.slow
def test_texts_get_better_and_the_best_model_is_loaded(tmp_path):
    plot = "curves.png" if find_spec("matplotlib") else ""
    done = start_script(
        NAME, "--output_dir", str(tmp_path), "--max_steps", "240", "--num_prompts", "48", "--plot", plot
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = report_of(done.stdout)
    right = {
        step: sum(text["completion"] == text["reference"] for text in texts_at(tmp_path, step)) / 48
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
