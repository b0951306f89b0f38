"""Type checkers accept a user's file that uses the public names, and see a mistake in it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USER_FILE = Path(__file__).parent / "user_file.py"
MISTAKE = 'SamplingParams(temperature="warm")\n'


@pytest.fixture
def files(tmp_path) -> tuple[str, str]:
    """A copy of the user's file, outside of the project, and one with a mistake in its last line."""
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(USER_FILE.read_text())
    wrong.write_text(USER_FILE.read_text() + MISTAKE)
    return str(right), str(wrong)


def run(tool: str, *arguments: str, folder: Path) -> str:
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed")
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    command = [sys.executable, "-m", tool, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.stdout, done.stderr
    return done.stdout


@pytest.mark.slow
def test_mypy_accepts_a_users_file(files, tmp_path):
    output = run("mypy", "--config-file=", "--strict", "--follow-imports=silent", *files, folder=tmp_path)
    wrong_line = len(USER_FILE.read_text().splitlines()) + 1
    assert [line.partition(" error: ")[0] for line in output.splitlines()[:-1]] == [f"wrong.py:{wrong_line}:"], output


@pytest.mark.slow
def test_pyright_accepts_a_users_file(files, tmp_path):
    settings = {"typeCheckingMode": "strict", "include": ["right.py", "wrong.py"], "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    # basedpyright is pyright with its own node in the wheel, so it runs without a network.
    output = run("basedpyright", "--outputjson", "--pythonpath", sys.executable, folder=tmp_path)
    complaints = json.loads(output)["generalDiagnostics"]
    assert {Path(entry["file"]).name for entry in complaints} == {"wrong.py"}, complaints
    assert [entry["rule"] for entry in complaints] == ["reportArgumentType"], complaints
