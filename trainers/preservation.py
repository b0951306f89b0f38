"""Preservation: what an evaluation during training leaves as it was. Knows no Trainer and no ranks."""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

MODULE_STATE = ("training", "gradient_checkpointing", "_gradient_checkpointing_func")
# Switches of the whole process that code of metrics has been seen to leave: how each is read and set.
SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, lambda device: torch.set_default_device(None if device.type == "cpu" else device)),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_num_threads, torch.set_num_threads),
    (np.geterr, lambda errors: np.seterr(**errors)),
)


@contextmanager
def preserved(models: Sequence[nn.Module], tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """
    Runs a block with the models in `eval` mode. Afterwards, also when the block raised, all is as before: every
    submodule's train/eval flag and gradient checkpointing with its arguments, `config.use_cache`, the generation
    config, the tokenizer's padding side, the random numbers of Python, NumPy and PyTorch on every device that the
    models are on, and global switches such as the grad mode (`SWITCHES`).

    Args:
        models (`Sequence[nn.Module]`): The target, and draft models if there are any; wrapped or not.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Their tokenizer.
    """
    with ExitStack() as restored:
        restored.callback(_random_states(models))
        for read, set_back in SWITCHES:
            restored.callback(_switch_kept(read, set_back))
        restored.callback(_kept(tokenizer, "padding_side", "truncation_side"))
        for module in [module for model in models for module in model.modules()]:
            restored.callback(_kept(module, *MODULE_STATE))
            owned = vars(module)
            if "config" in owned and hasattr(module.config, "use_cache"):
                restored.callback(_kept(module.config, "use_cache"))
            if "generation_config" in owned:
                restored.callback(_kept(module, "generation_config"))
                restored.callback(_contents_kept(module.generation_config))
        for model in models:
            model.eval()
        yield


def _kept(owner: object, *names: str) -> Callable[[], None]:
    """What gives an object the values of its attributes back, without its `__setattr__`."""
    values = {name: vars(owner)[name] for name in names if name in vars(owner)}

    def restore() -> None:
        for name in names:
            vars(owner).pop(name, None)
        vars(owner).update(values)

    return restore


def _switch_kept(read: Callable[[], Any], set_back: Callable[[Any], Any]) -> Callable[[], None]:
    value = read()

    def restore() -> None:
        if read() != value:
            set_back(value)

    return restore


def _contents_kept(owner: object) -> Callable[[], None]:
    values = copy.deepcopy(vars(owner))

    def restore() -> None:
        if vars(owner) != values:
            vars(owner).clear()
            vars(owner).update(values)

    return restore


def _random_states(models: Sequence[nn.Module]) -> Callable[[], None]:
    devices = {parameter.device for model in models for parameter in model.parameters()}
    on_devices = {
        device: torch.get_device_module(device).get_rng_state(*_index(device))
        for device in devices
        if device.type not in ("cpu", "meta")
    }
    of_python, of_numpy, on_cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def restore() -> None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(on_cpu)
        for device, state in on_devices.items():
            torch.get_device_module(device).set_rng_state(state, *_index(device))

    return restore


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # of which there is only one
