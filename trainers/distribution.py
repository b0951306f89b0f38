"""Distribution: splits work over the ranks, and gives all of them the results or the error. Knows no models."""

import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import gather_object

T = TypeVar("T")


class BrokenPass(RuntimeError):
    """
    An error inside a pass of a sharded model. The other ranks wait in that pass, so that this rank can take part in
    no further exchange: it ends alone, and whoever started the ranks ends the others.
    """


def split_by_length(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """
    Which items each rank takes. They are given out longest first, each to the rank that has the least so far.

    Args:
        lengths (`Sequence[int]`): The cost of each item.
        num_ranks (`int`): How many ranks there are; some get nothing if there are fewer items.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return [sorted(share) for share in shares]


def on_all_ranks(compute: Callable[[], T]) -> list[T]:
    """
    Runs `compute` on every rank and gives everyone all results, in the order of the ranks. All ranks have to call it.

    Raises:
        `Exception`: on every rank, if one raised: there its own, on the others a `RuntimeError` that names rank and
            error. A [`BrokenPass`] is raised where it happened only.
    """
    error, packed = None, b""
    try:
        packed = pickle.dumps(compute())  # here, where a failure does not leave the others waiting
    except BrokenPass:
        raise
    except Exception as caught:
        error = caught
    message = None if error is None else f"{type(error).__name__}: {error}"
    parts = gather_object([(packed, message)])
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(parts):
        if message is not None:
            raise RuntimeError(f"Rank {rank} failed, so all of them stop here. Its error was {message}")
    return [pickle.loads(packed) for packed, _ in parts]


def on_main_rank(compute: Callable[[], T]) -> T:
    """Runs `compute` on the main rank and gives everyone its result, or its error as [`on_all_ranks`] does."""
    is_main = PartialState().is_main_process
    return on_all_ranks(lambda: [compute()] if is_main else [])[0][0]  # the first rank is the main one
