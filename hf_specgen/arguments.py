"""Numbers that users give, checked in one place: each function returns the number or raises in a sentence, which
shows what was given by `shown`.

Below all rooms: knows nothing of this package.
"""

import reprlib
from numbers import Integral, Real

import torch

FP32_MAX = torch.finfo(torch.float32).max


def checked_number(name: str, value: float) -> float:
    """Returns a finite number as float, or raises in a sentence that calls it `name`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` has to be a number, but is {shown(value)}.")
    if not -FP32_MAX <= value <= FP32_MAX:
        raise ValueError(f"`{name}` has to be a finite number that fp32 can hold, but is {shown(value)}.")
    return float(value)


def checked_probability(name: str, value: float) -> float:
    """Returns a number in [0, 1] as float, or raises in a sentence that calls it `name`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= 1:
        raise ValueError(f"`{name}` has to be in [0, 1], but is {shown(value)}.")
    return float(value)


def checked_integer(name: str, value: int) -> int:
    """Returns an integer as int, or raises in a sentence that calls it `name`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` has to consist of integers, but holds {shown(value)}.")
    return int(value)


def check_count(name: str, count: int, minimum: int = 1, maximum: int | None = None) -> int:
    """Returns a count as int, or raises in a sentence that calls it `name`."""
    if isinstance(count, bool) or not isinstance(count, Integral):
        raise TypeError(f"`{name}` has to be an int, but is {shown(count)}.")
    if count < minimum:
        raise ValueError(f"`{name}` has to be at least {minimum}, but is {shown(int(count))}.")
    if maximum is not None and count > maximum:
        raise ValueError(f"`{name}` has to be at most {maximum}, but is {shown(int(count))}.")
    return int(count)


class _ShortRepr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = 80
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 8

    def repr_int(self, value: int, level: int) -> str:  # Python refuses to print more than 4,300 digits
        return repr(value) if value.bit_length() <= 128 else f"an int of {value.bit_length()} bits"


_SHORT = _ShortRepr()


def shown(value: object) -> str:
    """The value for a sentence: its `repr`, cut where it is long or nested."""
    return _SHORT.repr(value)
