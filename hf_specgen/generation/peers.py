"""Ranks that decode together under `synced_gpus`: none of them waits for one that has given up."""

from types import TracebackType

import torch
from torch import distributed
from transformers import PreTrainedModel


def share_refusal(error: Exception | None) -> None:
    """
    Tells the other ranks, before the first pass, whether this one refuses its call.

    Raises:
        `Exception`: the error of this rank.
        `RuntimeError`: if another rank refuses, with its number and its reason.
    """
    reasons: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(reasons, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    refusals = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    if refusals:
        raise RuntimeError(f"`synced_gpus` decodes on all ranks or on none, and some refuse. {' '.join(refusals)}")


class Peers:
    """
    The other ranks of a call, while it decodes. As a context it tells them of an exception, so that they raise too
    instead of waiting for this rank. Inside a pass they cannot be told: then the exception gets a note that says so.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self._rank = distributed.get_rank()
        self._is_in_pass = False

    def have_unfinished(self, is_busy: bool) -> bool:
        """
        Whether any rank has work, asked by all of them before every round.

        Raises:
            `RuntimeError`: if one has failed.
        """
        num_busy, *failed = self._exchanged(is_busy, has_failed=False)
        if any(failed):
            ranks = [rank for rank, has_failed in enumerate(failed) if has_failed]
            raise _PeerFailed(f"`synced_gpus`: decoding failed on rank {ranks}, whose own error says why.")
        return num_busy > 0

    def _exchanged(self, is_busy: bool, has_failed: bool) -> list[float]:
        flags = torch.zeros(1 + distributed.get_world_size(), device=self._model.device)
        flags[0] = float(is_busy)
        flags[1 + self._rank] = float(has_failed)
        distributed.all_reduce(flags)
        return flags.tolist()

    def __enter__(self) -> "Peers":
        self._handles = [
            self._model.register_forward_pre_hook(self._enter_pass),
            self._model.register_forward_hook(self._leave_pass),
        ]
        return self

    def _enter_pass(self, *args: object) -> None:
        self._is_in_pass = True

    def _leave_pass(self, *args: object) -> None:
        self._is_in_pass = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if error is None or isinstance(error, _PeerFailed):
            return
        if self._is_in_pass:
            error.add_note(f"This is rank {self._rank}; the others wait in a pass that it does not complete.")
        else:
            error.add_note(f"This is rank {self._rank}; the others were told and raise too.")
            self._exchanged(is_busy=False, has_failed=True)


class _PeerFailed(RuntimeError):
    pass
