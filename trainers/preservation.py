"""Preservation: what an evaluation in the midst of training leaves as it was. Knows no Trainer and no ranks."""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

MODULE_STATE = ("training", "gradient_checkpointing", "_gradient_checkpointing_func")


@contextmanager
def preserved(models: Sequence[nn.Module], tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """
    Runs a block with the models in `eval` mode. Afterwards, also when the block raised, all is as before: every
    submodule's train/eval flag and gradient checkpointing with its arguments, `config.use_cache`, the generation
    config, the tokenizer's padding side, and the random numbers of Python, NumPy and PyTorch on every device that the
    models are on.

    Args:
        models (`Sequence[nn.Module]`): The target, and a draft model if there is one; wrapped or not.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Their tokenizer.
    """
    with ExitStack() as restored:
        restored.callback(_random_states(models))
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
