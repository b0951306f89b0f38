"""Memory: what a processor of the caller keeps from call to call, so that refused candidates leave nothing behind.

A snapshot copies the contents of what can be reached from the processor (attributes, containers, tensors, random
generators, variables of closures, fields of its class) and puts them back in place, so that whoever else holds these
objects sees the same. Knows nothing of rows and scores.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

ATOMS = (bool, int, float, complex, str, bytes, type(None), range, slice)
# No call changes them.
SHARED = (nn.Module, PreTrainedTokenizerBase, PreTrainedConfig, ModuleType, BuiltinFunctionType)
# Types of these hide no state.
TRANSPARENT = {
    *sys.stdlib_module_names,
    "torch",
    "transformers",
    "numpy",
    "tokenizers",
}
GENERATORS = (torch.Generator, random.Random, np.random.Generator)
MAX_PARTS = 2000  # the nearest ones; beyond, there is a trie or a table, and what a processor remembers is not there


class Snapshot:
    """
    The state of a processor at one moment.

    Args:
        processor (`Callable`):
            The processor.

    Raises:
        `ValueError`: if it holds something whose state cannot be taken back, naming it.
    """

    def __init__(self, processor: Callable[..., Any]):
        self._processor = processor
        self._contents = [(part, _copy(part)) for part in _parts(processor)]

    def is_current(self) -> bool:
        """Whether the processor is in the same state now."""
        parts = list(_parts(self._processor))
        return len(parts) == len(self._contents) and all(
            part is then and _is_unchanged(part, copy) for part, (then, copy) in zip(parts, self._contents)
        )

    def restore(self) -> None:
        """Puts the state back."""
        for part, copy in self._contents:
            _restore(part, copy)


class Memory:
    """
    The states of one processor as the rows of a batch need them: each as if it had been called for that row once per
    token, however often candidates were judged and refused in between.

    Args:
        processor (`Callable`):
            The processor.

    Raises:
        `ValueError`: if it holds something whose state cannot be taken back, naming it.
    """

    def __init__(self, processor: Callable[..., Any]):
        self._processor = processor
        self._initial = Snapshot(processor)
        self.is_used = False  # whether a call has ever changed the state
        self._states: dict[int, list[Snapshot]] = {}  # by row: after what is committed, and after each candidate

    def before(self, row: int, position: int) -> Snapshot:
        """The state in which a row's `position`th candidate, or the token behind the last one, has to be judged."""
        return self._states.setdefault(row, [self._initial])[position]

    def load(self, state: Snapshot) -> None:
        """Brings the processor into a state."""
        if not state.is_current():
            state.restore()

    def note(self, before: Snapshot, places: Iterable[tuple[int, int]]) -> None:
        """Takes down the state after a call that began in `before` and judged these rows and positions."""
        after = before if before.is_current() else Snapshot(self._processor)
        self.is_used = self.is_used or after is not before
        for row, position in places:
            self._states[row][position + 1 :] = [after]

    def commit(self, row: int, num_tokens: int) -> None:
        """A row keeps `num_tokens` of what was judged; 0 takes everything back."""
        states = self._states.get(row, [self._initial])
        self._states[row] = [states[min(num_tokens, len(states) - 1)]]

    def settle(self, row: int) -> None:
        """A row has ended: the processor is left as its text has made it."""
        self.load(self.before(row, 0))


def _parts(processor: Callable[..., Any]) -> Iterator[Any]:
    """The mutable objects within reach, the nearest first."""
    seen: set[int] = set()
    queue: deque[Any] = deque([processor])
    num_parts = 0
    while queue and num_parts < MAX_PARTS:
        item = queue.popleft()
        if isinstance(item, (*ATOMS, *SHARED)) or id(item) in seen:
            continue
        seen.add(id(item))
        if _is_hidden(item):
            raise ValueError(
                f"`{_name(processor)}` holds a `{type(item).__name__}`, whose state cannot be taken back when "
                "candidates are refused. Keep that state in Python objects, or call `generate` without a drafter."
            )
        if _is_mutable(item):
            num_parts += 1
            yield item
        queue.extend(_children(item))


def _name(processor: Callable[..., Any]) -> str:
    return processor.__name__ if isinstance(processor, (FunctionType, MethodType)) else type(processor).__name__


def _is_hidden(item: Any) -> bool:
    """Whether an object has a state that Python does not see: iterators, and types of compiled extensions."""
    kind = type(item)
    root = kind.__module__.partition(".")[0]
    if root in ("builtins", "itertools"):
        return isinstance(item, Iterator)
    is_python = hasattr(item, "__dict__") or any("__slots__" in vars(base) for base in kind.__mro__)
    return root not in TRANSPARENT and not is_python


def _is_mutable(item: Any) -> bool:
    return isinstance(item, (list, deque, dict, set, bytearray, CellType, Tensor, np.ndarray, *GENERATORS)) or bool(
        _fields(item)
    )


def _fields(item: Any) -> dict[str, Any]:
    """What an object keeps under names: its attributes, or those of a class of the caller."""
    if isinstance(item, type):
        if item.__module__.partition(".")[0] in TRANSPARENT:
            return {}
        fixed = (FunctionType, classmethod, staticmethod, property, type, MemberDescriptorType, GetSetDescriptorType)
        return {n: v for n, v in vars(item).items() if not n.startswith(("__", "_abc_")) and not isinstance(v, fixed)}
    if isinstance(item, (MethodType, partial)):
        return {}
    found = dict(vars(item)) if hasattr(item, "__dict__") else {}
    for base in type(item).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(item, name):
                found[name] = getattr(item, name)
    return found


def _children(item: Any) -> list[Any]:
    if isinstance(item, (list, tuple, set, frozenset, deque)):
        return [*item]
    if isinstance(item, dict):
        return [*item.values(), *_fields(item).values()]
    if isinstance(item, CellType):
        return _cell(item)
    if isinstance(item, MethodType):
        return [item.__self__, item.__func__]
    if isinstance(item, partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, FunctionType):
        defaults = [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
        return [*(item.__closure__ or ()), *defaults, *vars(item).values()]
    if isinstance(item, type):
        return [*item.__bases__, *_fields(item).values()]
    if isinstance(item, (Tensor, np.ndarray)):
        return []
    return [type(item), *_fields(item).values()]


def _cell(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # of a variable that has no value yet
        return []


def _copy(part: Any) -> Any:
    """What a mutable object holds."""
    if isinstance(part, Tensor):
        return _version(part), part.detach().clone()
    if isinstance(part, (list, deque)):
        return [*part]
    if isinstance(part, dict):
        return dict(part)
    if isinstance(part, (set, bytearray, np.ndarray)):
        return part.copy()
    if isinstance(part, CellType):
        return _cell(part)
    if isinstance(part, torch.Generator):
        return part.get_state()
    if isinstance(part, random.Random):
        return part.getstate()
    if isinstance(part, np.random.Generator):
        return part.bit_generator.state
    return _fields(part)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _is_unchanged(part: Any, copy: Any) -> bool:
    if isinstance(part, Tensor):
        version, values = copy
        return (version is not None and version == _version(part)) or torch.equal(part, values)
    if isinstance(part, np.ndarray):
        return part.shape == copy.shape and bool((part == copy).all())
    return _is_same(_copy(part), copy)


def _is_same(now: Any, then: Any) -> bool:
    """Whether two copies hold the same objects, or equal values of those that never change."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, ATOMS):
        return bool(now == then)
    if isinstance(now, Tensor):  # the state of a generator
        return torch.equal(now, then)
    if isinstance(now, (list, tuple)):
        return len(now) == len(then) and all(map(_is_same, now, then))
    if isinstance(now, dict):
        return len(now) == len(then) and all(n == t and _is_same(now[n], then[t]) for n, t in zip(now, then))
    if isinstance(now, (set, frozenset, bytearray)):
        return now == then
    return False


def _restore(part: Any, copy: Any) -> None:
    if isinstance(part, Tensor):
        with torch.no_grad():
            part.copy_(copy[1])
    elif isinstance(part, np.ndarray):
        part[...] = copy
    elif isinstance(part, (list, deque)):
        part.clear()
        part.extend(copy)
    elif isinstance(part, (dict, set)):
        part.clear()
        part.update(copy)
    elif isinstance(part, bytearray):
        part[:] = copy
    elif isinstance(part, CellType):
        if copy:
            part.cell_contents = copy[0]
    elif isinstance(part, torch.Generator):
        part.set_state(copy)
    elif isinstance(part, random.Random):
        part.setstate(copy)
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = copy
    else:
        fields = _fields(part)
        assign = type.__setattr__ if isinstance(part, type) else object.__setattr__  # those of frozen dataclasses too
        for name in fields.keys() - copy.keys():
            delattr(part, name)
        for name, value in copy.items():
            if name not in fields or fields[name] is not value:
                assign(part, name, value)
