"""Faster matrix products for a few rows in float32 on a CPU, chosen by measurement.

BLAS treats `x @ weight.T` with a few rows as a matrix product with a tiny first dimension; seen from the other side,
`(weight @ x.T).T`, the same product can take half the time, or longer, depending on shape, rows and threads. So both
are timed and the winner is used. Knows linear layers only, neither decoding nor transformers.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEASURED_NUM_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
MIN_GAIN = 0.05  # a product replaces the stock one only if it is faster by this share
MIN_REPETITIONS, MAX_REPETITIONS = 3, 15
MAX_SECONDS = 3.0  # on a busy machine repetitions stop here
ELEMENTS_PER_REPETITION = 2**26  # large weights need fewer repetitions, since their times vary less

Product = Callable[[Tensor, Tensor], Tensor]  # rows (num_rows, in_features), weight -> (num_rows, out_features)


def stock_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # (num_rows, out_features)
    return F.linear(rows, weight, bias)


def transposed_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # (num_rows, out_features)
    num_rows = rows.shape[0]
    if num_rows == 1:  # a second row, thrown away, avoids the matrix-vector product, which can be slower than both
        rows = rows.repeat(2, 1)
    # Contiguous as F.linear's result is, because callers use `.view`. The copy is part of what is measured.
    product = torch.mm(weight, rows.t()).t()[:num_rows].contiguous()
    return product if bias is None else product.add_(bias)


@dataclass(frozen=True)
class LinearPlan:
    """For which numbers of rows the transposed product is used, and at which thread count that was measured."""

    num_rows: frozenset[int]
    num_threads: int


class Linear(nn.Linear):
    """A `torch.nn.Linear` that uses the transposed product where its plan says so. Copies and pickles of it are plain
    `torch.nn.Linear`s, so that nothing saved depends on this file."""

    plan: LinearPlan

    def forward(self, input: Tensor) -> Tensor:  # (..., in_features) -> (..., out_features)
        if input.numel() // self.in_features in self.plan.num_rows and self._is_as_measured(input):
            product = transposed_product(input.reshape(-1, self.in_features), self.weight, self.bias)
            return product.view(*input.shape[:-1], self.out_features)
        return F.linear(input, self.weight, self.bias)

    def _is_as_measured(self, input: Tensor) -> bool:
        weight = self.weight
        return (
            weight.dtype == input.dtype == torch.float32
            and weight.device.type == input.device.type == "cpu"
            and not (torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad))
            and torch.get_num_threads() == self.plan.num_threads
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in vars(self).items() if name != "plan"}
        return object.__new__, (nn.Linear,), state


@dataclass(frozen=True)
class LinearTiming:
    """
    Median times of both products for one weight shape and number of rows.

    Args:
        shape (`torch.Size`): Shape of the weight, (out_features, in_features).
        num_rows (`int`): Number of rows multiplied at once.
        stock_us (`float`): Microseconds of `torch.nn.functional.linear`.
        transposed_us (`float`): Microseconds of `(weight @ rows.T).T`, made contiguous.
    """

    shape: torch.Size
    num_rows: int
    stock_us: float
    transposed_us: float

    @property
    def is_transposed_faster(self) -> bool:
        return self.transposed_us < (1 - MIN_GAIN) * self.stock_us


@dataclass(frozen=True)
class LinearTuning:
    """
    What [`tune_linears`] measured and changed. `str()` gives the table; as a context manager it restores the modules
    at the end.

    Args:
        timings (`tuple[LinearTiming, ...]`): The measurements, by shape and number of rows.
        num_threads (`int`): The thread count measured at; at any other one the modules use the stock product.
        modules (`tuple[torch.nn.Linear, ...]`): The modules that were given the faster product.
    """

    timings: tuple[LinearTiming, ...]
    num_threads: int
    modules: tuple[nn.Linear, ...] = field(repr=False)

    def restore(self) -> None:
        """Make every module a plain `torch.nn.Linear` again. Doing it twice is doing it once."""
        for module in self.modules:
            if type(module) is Linear:
                del module.plan
                module.__class__ = nn.Linear  # type: ignore[assignment]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def __str__(self) -> str:
        shapes = list(dict.fromkeys(timing.shape for timing in self.timings))
        table = [["rows", *(" x ".join(map(str, shape)) for shape in shapes)]]
        for num_rows in dict.fromkeys(timing.num_rows for timing in self.timings):
            cells = [
                f"{timing.stock_us:.0f} / {timing.transposed_us:.0f} {'*' if timing.is_transposed_faster else ' '}"
                for timing in self.timings
                if timing.num_rows == num_rows
            ]
            table.append([str(num_rows), *cells])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        title = f"Linear layers at {self.num_threads} threads: microseconds stock / transposed, * where that is used"
        return "\n".join([title, *lines])


def tune_linears(model: nn.Module, num_rows: Iterable[int] = MEASURED_NUM_ROWS) -> LinearTuning:
    r"""
    Time two ways to multiply a few rows with each weight shape of `model`, at the present thread count, and give the
    faster one to its linear layers. Takes about a second for a model of 135M parameters.

    Only float32 modules on the CPU whose type is exactly `torch.nn.Linear` are touched. They fall back to the stock
    product when gradients are recorded, under autocast and `torch.compile`, and at another thread count. Results
    differ from the stock product's by rounding only.

    Args:
        model (`torch.nn.Module`):
            The model to change in place.
        num_rows (`Iterable[int]`, *optional*, defaults to `(1, 2, 3, 4, 5, 6, 8, 12, 16)`):
            Numbers of rows to measure. Those between two of them do as the nearest one does. 1 is plain decoding
            of a single sequence, which gains as well.

    Returns:
        [`LinearTuning`]: the measurements, with `restore()` to undo the change.

    Raises:
        `ValueError`: if `model` has no such layers or is tuned already, or if `num_rows` is empty or holds numbers
        below 1.
    """
    counts = sorted(set(num_rows))
    if not counts or counts[0] < 1:
        raise ValueError(f"`num_rows` has to hold numbers of at least 1, but is {counts}.")
    modules_by_shape = _linears_by_shape(model)
    timings = _measure(
        {shape: [module.weight for module in modules] for shape, modules in modules_by_shape.items()}, counts
    )

    changed: list[nn.Linear] = []
    for shape, modules in modules_by_shape.items():
        plan = LinearPlan(_faster_num_rows(timings, shape), torch.get_num_threads())
        for module in modules if plan.num_rows else []:
            module.__class__ = Linear
            module.plan = plan  # type: ignore[assignment]
            changed.append(module)
    return LinearTuning(tuple(timings), torch.get_num_threads(), tuple(changed))


def _linears_by_shape(model: nn.Module) -> dict[torch.Size, list[nn.Linear]]:
    modules_by_shape: dict[torch.Size, list[nn.Linear]] = {}
    for name, module in model.named_modules():
        if type(module) is Linear:
            raise ValueError(f"`model` is tuned already (`{name}`). Call `restore()` of that tuning first.")
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
            modules_by_shape.setdefault(module.weight.shape, []).append(module)
    if not modules_by_shape:
        raise ValueError(
            f"`model` has to hold float32 `torch.nn.Linear`s on the CPU, but this {type(model).__name__} has none."
        )
    return modules_by_shape


@torch.no_grad()
def _measure(weights_by_shape: dict[torch.Size, list[Tensor]], counts: list[int]) -> list[LinearTiming]:
    # Every call gets the next weight and all shapes take turns, so that weights come from memory, not from a cache, as
    # in a forward pass. The products take turns by sweeps, not by calls: a call on one thread would slow the next one.
    generator = torch.Generator().manual_seed(0)
    cycles: dict[torch.Size, Iterator[Tensor]] = {shape: cycle(ws) for shape, ws in weights_by_shape.items()}
    samples: dict[tuple[torch.Size, int], dict[Product, list[float]]] = {}
    start = time.perf_counter()
    for repetition in range(-1, MAX_REPETITIONS):  # -1 is the warm-up
        if repetition > 0 and time.perf_counter() - start > MAX_SECONDS:
            break
        for shape, weights in cycles.items():
            if repetition >= max(MIN_REPETITIONS, ELEMENTS_PER_REPETITION // shape.numel()):
                continue
            inputs = [torch.randn(count, shape[1], generator=generator) for count in counts]
            for product in (stock_product, transposed_product):
                product(inputs[0], next(weights))  # the first call after another shape is slower
                for count, rows in zip(counts, inputs, strict=True):
                    seconds = _seconds(product, rows, next(weights))
                    if repetition >= 0:
                        samples.setdefault((shape, count), {}).setdefault(product, []).append(seconds)
    return [
        LinearTiming(shape, count, 1e6 * median(of[stock_product]), 1e6 * median(of[transposed_product]))
        for (shape, count), of in samples.items()
    ]


def _seconds(product: Product, rows: Tensor, weight: Tensor) -> float:
    start = time.perf_counter()
    product(rows, weight)
    return time.perf_counter() - start


def _faster_num_rows(timings: list[LinearTiming], shape: torch.Size) -> frozenset[int]:
    of_shape = {timing.num_rows: timing for timing in timings if timing.shape == shape}

    def nearest(count: int) -> LinearTiming:  # the larger of two equally near ones
        return of_shape[min(of_shape, key=lambda measured: (abs(measured - count), -measured))]

    counts = range(min(of_shape), max(of_shape) + 1)
    return frozenset(count for count in counts if nearest(count).is_transposed_faster)
