"""The processes that `torchrun` or `accelerate launch` started, and what they run on."""

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState

from hf_specgen import __version__


def start_processes() -> PartialState:
    """This process among those that were started; by themselves they would not find each other on a CPU."""
    state = PartialState(cpu=not torch.cuda.is_available())
    num_started = int(os.environ.get("WORLD_SIZE", 1))
    if num_started != state.num_processes:
        raise ValueError(
            f"`WORLD_SIZE` has to be the number of processes that found each other, but is {num_started} instead of "
            f"{state.num_processes}. Start them with `torchrun` or `accelerate launch`."
        )
    return state


def environment(state: PartialState) -> dict[str, Any]:
    """Hardware and versions."""
    is_cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if is_cuda else cpu_name(),
        "num_threads": torch.get_num_threads(),
        "num_processes": state.num_processes,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_specgen": __version__,
    }


def cpu_name() -> str:
    """The processor's model name where Linux tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
