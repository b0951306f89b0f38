"""`help()` of every name on the reference pages tells its arguments, and the errors that it raises by itself."""

import ast
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from tests.support.reference_pages import listed_paths

MADE_BY_BACKENDS = (
    "hf_specgen.serving.streams.BatchStream",
    "hf_specgen.serving.streams.TextStream",
    "hf_specgen.serving.async_stream.AsyncTextStream",
)


def resolved(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return pkgutil.resolve_name(f"{module}:{name}")


def own_functions(thing: Any) -> list[Callable]:
    """The function itself, or what a class runs when one of it is made."""
    if inspect.isfunction(thing):
        return [thing]
    names = ("__post_init__",) if is_dataclass(thing) else ("__init__",)
    return [vars(thing)[name] for name in names if inspect.isfunction(vars(thing).get(name))]


def parameters(thing: Any) -> set[str]:
    """The names that a caller may give; of a class those that are its own."""
    if is_dataclass(thing):
        return {field.name for field in fields(thing) if field.init and field.name in thing.__annotations__}
    signatures = [inspect.signature(function) for function in own_functions(thing)[:1]]
    given = [entry for signature in signatures for entry in signature.parameters.values()]
    names = {entry.name for entry in given if entry.kind is not inspect.Parameter.VAR_KEYWORD}
    return {name for name in names if name != "self" and not name.startswith("_")}


def raised(function: Callable) -> set[str]:
    """The classes of errors in a function's own `raise` statements."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    names = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    # `RequestTypeError` is a `RequestError` and a `TypeError`; small letters are functions that make an error.
    return {name.replace("RequestTypeError", "RequestError") for name in names if name[0].isupper()}


def public_methods(thing: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in vars(thing).items()
        if not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, (property, classmethod)))
    }


@pytest.mark.parametrize("path", sorted(listed_paths()))
def test_help_tells_arguments_and_errors(path):
    thing = resolved(path)
    docstring = inspect.getdoc(thing) or ""
    assert docstring
    names = set() if path in MADE_BY_BACKENDS else parameters(thing)
    assert not names or re.search(r"^(Args|Attributes):$", docstring, re.MULTILINE), f"no Args for {names}"
    assert {name for name in names if not re.search(rf"\b{name}\b", docstring)} == set()
    errors = {error for function in own_functions(thing) for error in raised(function)}
    assert {error for error in errors if error not in docstring} == set()


@pytest.mark.parametrize("path", sorted(listed_paths()))
def test_help_tells_what_methods_do(path):
    thing = resolved(path)
    if not inspect.isclass(thing):
        return
    assert [name for name in public_methods(thing) if not inspect.getdoc(getattr(thing, name))] == []
