"""What stands around a transformers model: compiled modules, data parallelism, PEFT and its adapters per row."""

from functools import partial
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel


def unwrap(model: Any) -> PreTrainedModel:
    """
    The transformers model inside a compiled module, a data-parallel wrapper or a `PeftModel`.

    Raises:
        `TypeError`: if there is none that can generate.
        `ValueError`: for a PEFT model that learns a prompt.
    """
    if isinstance(model, OptimizedModule):
        return unwrap(model._orig_mod)
    if isinstance(model, DataParallel | DistributedDataParallel):
        return unwrap(model.module)
    if is_peft_model(model):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            raise ValueError(
                "PEFT models that learn a prompt build their inputs where speculation cannot follow. Use LoRA or "
                "another method that changes layers."
            )
        return unwrap(model.get_base_model())
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise TypeError(f"Speculation needs a transformers model that can generate, but got {type(model).__name__!r}.")
    return model


def without_data_parallel(model: Any) -> Any:
    """What stands inside a data-parallel wrapper; other models as they are."""
    return without_data_parallel(model.module) if isinstance(model, DataParallel | DistributedDataParallel) else model


def is_peft_model(model: Any) -> bool:
    """Whether this is a `PeftModel`, told without importing peft."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapter_names_of_rows(model: nn.Module) -> list[str]:
    """
    The adapter of each row, as PEFT's `generate(..., adapter_names=[...])` writes it into hooks of the layers; empty
    if it was not asked for.
    """
    return next((list(names) for _, _, names in _adapter_hooks(model)), [])


def remove_adapter_hooks(model: nn.Module) -> None:
    """Removes the hooks of `adapter_names`: PEFT leaves them where `generate` raises, and later calls would fail."""
    for layer, key, _ in _adapter_hooks(model):
        del layer._forward_pre_hooks[key]
        layer._forward_pre_hooks_with_kwargs.pop(key, None)


def _adapter_hooks(model: nn.Module) -> list[tuple[nn.Module, int, list[str]]]:
    return [
        (layer, key, hook.keywords["adapter_names"])
        for layer in model.modules()
        for key, hook in layer._forward_pre_hooks.items()
        if isinstance(hook, partial) and "adapter_names" in hook.keywords
    ]
