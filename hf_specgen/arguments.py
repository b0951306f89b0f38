"""Numbers that users give, checked in one place: each function returns the number or raises in a sentence.

Below all rooms: knows nothing of this package.
"""

from numbers import Integral, Real

import torch

FP32_MAX = torch.finfo(torch.float32).max


def checked_number(name: str, value: float) -> float:
    """Returns a finite number as float, or raises in a sentence that calls it `name`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` has to be a number, but is {value!r}.")
    if not -FP32_MAX <= value <= FP32_MAX:
        raise ValueError(f"`{name}` has to be a finite number that fp32 can hold, but is {value!r}.")
    return float(value)


def checked_integer(name: str, value: int) -> int:
    """Returns an integer as int, or raises in a sentence that calls it `name`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` has to consist of integers, but holds {value!r}.")
    return int(value)


def check_count(name: str, count: int) -> int:
    """Returns a number of tokens, or raises in a sentence that calls it `name`."""
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"`{name}` has to be an int, but is {count!r}.")
    if count < 1:
        raise ValueError(f"`{name}` has to be at least 1, but is {count}.")
    return count
