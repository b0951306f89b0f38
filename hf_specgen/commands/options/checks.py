"""Checks that several commands share. Options are called by the names that a user typed."""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

EMBEDDED, SMALL, BYTES = "smollm2", "small", "bytes"
MODEL_HELP = f"'{EMBEDDED}' (embedded), '{SMALL}' (4M random parameters), a folder or a hub name."
TOKENIZER_HELP = f"A folder or a hub name, where it is not the model's own; '{BYTES}' for ids that are bytes."
NOT_SAMPLING: Mapping[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # leave the distribution as it is


def is_given(value: Any) -> bool:
    """Whether a user has set an option whose default is None or False."""
    return value is not None and value is not False


def check_counts(options: Any, *names: str) -> None:
    """Refuses what is given and below 1."""
    for name in names:
        value = vars(options)[name]
        if value is not None and value < 1:
            raise ValueError(f"`--{name}` has to be at least 1, but is {value}.")


def check_needs(options: Any, name: str, *needed: str) -> None:
    """Refuses an option that counts only beside one of others, given without them."""
    given = vars(options)
    if is_given(given[name]) and not any(is_given(given[other]) for other in needed):
        others = " or ".join(f"`--{other}`" for other in needed)
        raise ValueError(f"`--{name}` needs {others}, but is {given[name]!r} without.")


def check_excludes(options: Any, *names: str) -> None:
    """Refuses options of which only one can count."""
    given = [f"`--{name}` {value!r}" for name in names if is_given(value := vars(options)[name])]
    if len(given) > 1:
        raise ValueError(f"Only one of {' and '.join(given)} can count: leave out the other.")


def check_sampling(options: Any) -> None:
    """Refuses values that cannot be, and those that would be ignored without sampling."""
    given = vars(options)
    for name, neutral in NOT_SAMPLING.items():
        if name in given and given[name] != neutral and not options.do_sample:
            raise ValueError(f"`--{name}` needs `--do_sample`, but is {given[name]!r} without.")
    if not 0 < options.temperature < float("inf"):
        raise ValueError(f"`--temperature` has to be a number above 0, but is {options.temperature}.")
    if "top_k" in given and options.top_k < 0:
        raise ValueError(f"`--top_k` has to be at least 0, which is all, but is {options.top_k}.")
    if "top_p" in given and not 0 < options.top_p <= 1:
        raise ValueError(f"`--top_p` has to be above 0 and at most 1, but is {options.top_p}.")


def check_threshold(name: str, value: float | None) -> None:
    """Refuses what is no probability below 1."""
    if value is not None and not 0 <= value < 1:
        raise ValueError(f"`--{name}` has to be at least 0 and below 1, but is {value}.")


def check_tokenizer(options: Any, model: str) -> None:
    """Refuses a tokenizer for a model that has its own."""
    if options.tokenizer is not None and model in (EMBEDDED, SMALL):
        raise ValueError(f"`--tokenizer` is for models from a folder or the hub; {model!r} has its own.")


def check_seed(options: Any) -> None:
    """Refuses what torch and numpy would not take."""
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"`--seed` has to be at least 0 and below 2**32, but is {options.seed}.")


def check_plot(options: Any) -> None:
    if options.plot and find_spec("matplotlib") is None:
        raise ValueError("`--plot` needs matplotlib: `pip install matplotlib`, or give `--plot ''`.")


def check_output_file(name: str, path: str | None) -> None:
    """Refuses a place where no file can be written, before anything is loaded and measured; nothing is changed yet."""
    if path is None:
        return
    place = Path(path).expanduser()
    if place.is_dir() or path.endswith(os.sep):
        raise ValueError(f"`--{name}` has to be a file, but {path!r} is a folder.")
    if not place.exists():
        check_output_folder(name, place.parent)
        return
    try:
        place.open("ab").close()
    except OSError as error:
        raise ValueError(f"`--{name}` has to be a file that can be written, but {path!r} cannot: {error}.") from error


def check_output_folder(name: str, path: str | Path) -> None:
    """Refuses a folder that can neither be made nor written to; nothing is changed yet."""
    place = Path(path).expanduser().absolute()
    nearest = next(parent for parent in (place, *place.parents) if os.path.lexists(parent))
    try:
        TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise ValueError(
            f"`--{name}` needs the folder {str(place)!r}, which cannot be written to: {error}."
        ) from error
