"""Sharding: makes a model generate on all ranks, whether each has the whole of it or a shard. Knows no prompts."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate import PartialState
from torch import distributed, nn
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_specgen.engine import self_check
from hf_specgen.generation import unwrap

from .distribution import BrokenPass

logger = logging.get_logger(__name__)


class SynchronisedRounds:
    """
    Keeps the ranks of a sharded model in step: a pass happens on all of them or on none. Called before every round, it
    tells whether any rank has work, by one sum over the ranks; a backend takes it as `has_unfinished_peers`.

    Args:
        model ([`~transformers.PreTrainedModel`]): The model, whose passes are watched.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._is_pass_owed = False
        self._broken: BaseException | None = None  # what was raised inside a pass, whoever catches it
        self._hooks = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def __call__(self, is_busy: bool) -> bool:
        """Whether any rank has work; then this one owes the others one pass. Raises what broke an earlier pass."""
        if self._broken is not None:
            raise self._broken
        if not self._is_pass_owed:
            flag = torch.tensor(int(is_busy), device=PartialState().device)
            distributed.all_reduce(flag)
            self._is_pass_owed = bool(flag)
        return self._is_pass_owed

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """
        When the block raises, this rank runs dummy passes until the other ranks have finished, and then raises.

        Raises:
            [`BrokenPass`]: at once, if the error came from inside a pass (a lack of memory, for example), with the
            rank and the error, also in the log: the others cannot finish that pass.
        """
        try:
            try:
                yield
            except Exception:
                while self._broken is None and self(False):
                    with torch.no_grad():
                        self.model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.model.device))
                raise
        except Exception:
            if (broken := self._broken) is None:
                raise
            message = (
                f"Rank {PartialState().process_index} failed inside a pass of a sharded model, which the other ranks "
                f"cannot finish without it. Its error was {type(broken).__name__}: {broken}"
            )
            logger.error(message)
            raise BrokenPass(message) from broken

    def close(self) -> None:
        """Removes the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, *args: Any) -> None:
        self._is_pass_owed = False

    def _leave(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if output is None:  # the hook is called while an exception leaves the pass
            self._broken = sys.exc_info()[1]


@contextmanager
def generating_model(model: nn.Module) -> Iterator[tuple[PreTrainedModel, SynchronisedRounds | None]]:
    """
    Makes a model ready to generate, and says in the log how; afterwards its weights are sharded as before.

    - A whole model, also under DDP: the bare module; every rank goes at its own pace.
    - FSDP1: the parameters are gathered once, and the wrappers are taken out, because a pass through them would shard
      the parameters again. Every rank then goes at its own pace, which costs no communication per token, but the
      memory of the whole model, in the precision of the weights.
    - FSDP2 and ZeRO-3: as in training, every pass gathers the parameters layer by layer. All ranks run the same
      number of passes, in synchronised rounds; a rank that has finished runs dummy ones.

    Args:
        model (`nn.Module`):
            What a Trainer callback is given.

    Yields:
        `tuple[PreTrainedModel, SynchronisedRounds | None]`: the model to give to a backend, and what to ask before
        every round; None where each rank is on its own.

    Raises:
        `ValueError`: for tensor parallelism, which needs the same prompts on all ranks.
    """
    while isinstance(model, DistributedDataParallel | DataParallel | OptimizedModule):
        model = model._orig_mod if isinstance(model, OptimizedModule) else model.module
    is_zero3 = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    _refuse_tensor_parallelism(model, has_shards=bool(sharded))
    if isinstance(model, FullyShardedDataParallel):
        logger.info("Generating with FSDP1: all parameters are gathered on every rank.")
        with FullyShardedDataParallel.summon_full_params(model, writeback=False), _without_wrappers(model) as bare:
            yield unwrap(bare), None
    elif sharded or is_zero3:
        logger.info(f"Generating with {'ZeRO-3' if is_zero3 else 'FSDP2'}: the ranks run synchronised rounds.")
        with _synchronised(model) as (target, rounds):
            try:
                yield target, rounds
            finally:
                for module in sharded:
                    module.reshard()
    else:
        logger.info("Generating with the whole model: every rank goes at its own pace.")
        yield unwrap(model), None


def _refuse_tensor_parallelism(model: nn.Module, has_shards: bool) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            if not has_shards or "tp" in (parameter.device_mesh.mesh_dim_names or ()):
                raise ValueError(
                    f"`{name}` is split by tensor parallelism, which needs the same prompts on all ranks. Evaluation "
                    "by generation serves DDP, FSDP and ZeRO-3."
                )


@contextmanager
def _without_wrappers(model: FullyShardedDataParallel) -> Iterator[nn.Module]:
    """The module inside FSDP1, with the wrappers of its submodules out of the way."""
    with ExitStack() as restored:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if parent is not model and isinstance(child, FullyShardedDataParallel):
                    restored.callback(parent._modules.__setitem__, name, child)
                    parent._modules[name] = child.module
        yield model.module


@contextmanager
def _synchronised(model: nn.Module) -> Iterator[tuple[PreTrainedModel, SynchronisedRounds]]:
    target = unwrap(model)
    with _entered_through(model, target):
        self_check(target)  # whose passes are the same everywhere
        rounds = SynchronisedRounds(target)
        try:
            yield target, rounds
        finally:
            rounds.close()


@contextmanager
def _entered_through(root: nn.Module, target: PreTrainedModel) -> Iterator[None]:
    """
    Makes calls of `target` enter through the module around it, such as a `PeftModel`, whose hooks gather the
    parameters that belong to no layer.
    """
    if root is target:
        yield
        return
    forward, own = target.forward, "forward" in vars(target)
    is_inside = False

    def forward_through_root(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside
        if is_inside:
            return forward(*args, **kwargs)
        is_inside = True
        try:
            return root(*args, **kwargs)
        finally:
            is_inside = False

    target.forward = forward_through_root
    try:
        yield
    finally:
        if own:
            target.forward = forward
        else:
            del target.forward
