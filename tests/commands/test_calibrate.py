"""A drafter's confidence, recorded, fitted and written beside it."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_specgen import DSparkModel
from hf_specgen.commands import calibrate
from hf_specgen.commands.runner import run
from hf_specgen.dspark.calibration import CALIBRATION_FILE
from tests.support.launching import report_of
from tests.support.models import character_tokenizer, make_model

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,"


def save_pair(folder: Path, **settings: Any) -> list[str]:
    """A random target with a tokenizer, an untrained drafter and prompts; returns the options that name them."""
    target = make_model("qwen3", num_hidden_layers=4)
    target.generation_config.eos_token_id = None
    target.save_pretrained(folder / "target")
    character_tokenizer(LETTERS).save_pretrained(folder / "target")
    drafter = DSparkModel.from_target(
        target, mask_token_id=63, num_hidden_layers=1, block_size=3, markov_rank=8, **settings
    )
    drafter.save_pretrained(folder / "drafter")
    lines = [json.dumps({"turns": [LETTERS[start : start + 5]]}) for start in range(9)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    names = {"target": "target", "drafter": "drafter", "prompts": "prompts.jsonl"}
    return [word for option, name in names.items() for word in (f"--{option}", str(folder / name))]


@pytest.mark.slow
def test_the_calibration_is_written_beside_the_drafter(capsys, tmp_path):
    pair = save_pair(tmp_path)
    run("calibrate", [*pair, *"--max_new_tokens 96 --do_sample --temperature 2.0 --plot".split(), ""])
    report = report_of(capsys.readouterr().out)
    assert Path(report["file"]).parent == tmp_path / "drafter"
    calibration = DSparkModel.from_pretrained(tmp_path / "drafter").calibration
    assert calibration.temperatures == tuple(report["temperatures"])
    assert len(calibration.ece_after) == 3
    assert calibration.decoding == {"do_sample": True, "temperature": 2.0, "top_k": 0}
    # Of nine prompts, five are fitted: 96 tokens each, of which a round gives at most 4.
    assert calibration.num_samples >= 5 * (96 // 4 - 1)
    assert report["num_held_out"] < calibration.num_samples


def test_a_drafter_without_confidence_is_refused(capsys, tmp_path):
    pair = save_pair(tmp_path, enable_confidence_head=False, confidence_head_with_markov=False)
    with pytest.raises(SystemExit) as ended:
        run("calibrate", pair)
    assert ended.value.code == 2
    assert "error: `--drafter` has to have a confidence head" in capsys.readouterr().err


def test_one_prompt_cannot_be_fitted_and_measured_on(capsys, tmp_path):
    pair = save_pair(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["abc"]}')
    with pytest.raises(SystemExit):
        run("calibrate", pair)
    assert "error: `--prompts` has to hold at least 2 prompts" in capsys.readouterr().err


def refused(arguments: list[str], capsys, monkeypatch) -> tuple[str, list[str]]:
    """The sentence, and the halves that were recorded before it."""
    recorded = []

    def record(target, drafter, requests, batch_size, name):
        recorded.append(name)
        return original(target, drafter, requests, batch_size, name)

    original = calibrate.record
    monkeypatch.setattr(calibrate, "record", record)
    with pytest.raises(SystemExit) as ended:
        run("calibrate", arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err, recorded


@pytest.mark.parametrize(("max_new_tokens", "most"), [(1, 0), (4, 0), (16, 48)])
def test_texts_that_cannot_give_enough_blocks_are_refused_first(tmp_path, capsys, monkeypatch, max_new_tokens, most):
    """Each of the four held-out prompts gives at most a block per token, but for the last ones."""
    pair = save_pair(tmp_path)
    sentence, recorded = refused([*pair, "--plot", "", "--max_new_tokens", str(max_new_tokens)], capsys, monkeypatch)
    assert f"4 prompts to measure on give at most {most} blocks of 3 candidates, but 50 are needed" in sentence
    assert recorded == [] and not (tmp_path / "drafter" / CALIBRATION_FILE).exists()


def test_too_few_blocks_of_the_first_half_are_told_before_the_second(tmp_path, capsys, monkeypatch):
    pair = save_pair(tmp_path)
    monkeypatch.setattr("hf_specgen.dspark.calibration.MIN_RECORDS", 10_000)
    sentence, recorded = refused([*pair, "--plot", "", "--max_new_tokens", "24"], capsys, monkeypatch)
    assert "At least 10000 records" in sentence and recorded == ["fit"]
