"""Starts a script on several ranks, for the tests that need them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path


def torchrun(num_ranks: int, script: str, *arguments: str, limit: float = 600.0) -> None:
    """Runs a script of the tests on so many gloo ranks with one thread each; fails if it takes more seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), script, *arguments]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, timeout=limit, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read_ranks(folder: Path) -> list[dict]:
    """What the ranks have written, in their order."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]
