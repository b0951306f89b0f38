"""Starts a script on several ranks or as a user does, for the tests that need processes of their own.

The limits end what hangs; they judge no speed, so they are generous.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 600.0  # seconds


def environment_of_a_script() -> dict[str, str]:
    """That of this process, for one thread on the CPU, with this project found and no hub asked."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return environment | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "PYTHONIOENCODING": "utf-8"}


def torchrun(num_ranks: int, script: str, *arguments: str, limit: float = LIMIT) -> None:
    """Runs a script of the tests on so many gloo ranks with one thread each; fails if it takes more seconds."""
    done = finished(num_ranks, script, *arguments, limit=limit)
    assert done.returncode == 0, done.stderr[-4000:]


def finished(num_ranks: int, script: str, *arguments: str, limit: float = LIMIT) -> subprocess.CompletedProcess[str]:
    """As `torchrun`, whether the ranks succeed or not."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), script, *arguments]
    environment = environment_of_a_script() | {"PYTHONSAFEPATH": "1"}  # nothing is imported from beside the script
    return subprocess.run(command, env=environment, timeout=limit, capture_output=True, text=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read_ranks(folder: Path) -> list[dict]:
    """What the ranks have written, in their order."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]


def start_script(name: str, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Runs scripts/<name>.py to its end."""
    return subprocess.run(
        [sys.executable, *launcher, f"scripts/{name}.py", *arguments],
        cwd=ROOT,
        env=environment_of_a_script(),
        timeout=LIMIT,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )


def report_of(stdout: str) -> dict:
    """The JSON object in the last line of what a command has printed."""
    return json.loads(stdout.splitlines()[-1])
