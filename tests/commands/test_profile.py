"""What a pass costs, measured and kept."""

import torch

from hf_specgen import StepCosts
from hf_specgen.commands.runner import run
from tests.support.launching import report_of


def test_costs_are_written_and_printed(capsys, tmp_path):
    path = tmp_path / "new" / "costs.json"
    arguments = "--model small --num_rows 2 --max_positions 3 --context_length 8 --repeats 1 --num_threads 1".split()
    run("profile", [*arguments, "--output", str(path)])
    printed = capsys.readouterr().out
    report = report_of(printed)
    costs = StepCosts.load(path)
    assert list(costs.milliseconds) == [2, 4, 6]
    assert report["step_costs"]["milliseconds"] == {str(n): ms for n, ms in costs.milliseconds.items()}
    assert report["environment"]["num_threads"] == torch.get_num_threads() == 1
    assert report["settings"]["max_positions"] == 3
    assert "rows of 8 cached tokens" in printed
