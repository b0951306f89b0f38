"""The form of each field of `SamplingParams`: a function per field, which returns it or raises in a sentence."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ..arguments import check_count, checked_number, shown
from ..engine.logprobs import LOGPROBS_MODES
from ..logits_process.bias_and_masks import LogitBias
from ..logits_process.token_penalties import TokenPenalties

MIN_TEMPERATURE = 1e-5  # scores divided by much less leave the range of fp32
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1  # 64 bits, with a sign or without
# Bounds of what a client may choose, since memory or time grow with it.
MAX_COUNT = 2**31 - 1
MAX_SAMPLES = 4096
MAX_LOGPROBS = 1024
MAX_STOP_CHARACTERS = 16_384  # of all stop strings together
# What a caller's `chat_template_kwargs` must not say, since it is said elsewhere.
RESERVED_TEMPLATE_KEYS = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation documents max_length messages padding "
    "return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs tools truncation".split()
)


def _optional(check: Callable[[str, Any], Any], default: Any = None) -> Callable[[str, Any], Any]:
    return lambda name, value: default if value is None else check(name, value)


def _temperature(name: str, value: Any) -> float:
    value = checked_number(name, value)
    if value != 0.0 and value < MIN_TEMPERATURE:
        raise ValueError(
            f"`{name}` has to be 0 (the best token each time) or at least {MIN_TEMPERATURE}, but is {value}."
        )
    return value


def _top_p(name: str, value: Any) -> float:
    value = checked_number(name, value)
    if not 0.0 < value <= 1.0:
        raise ValueError(f"`{name}` has to be above 0 and at most 1, but is {value}. Pass 1.0 for none.")
    return value


def _min_p(name: str, value: Any) -> float:
    value = checked_number(name, value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"`{name}` has to be between 0 and 1, but is {value}.")
    return value


def _repetition_penalty(name: str, value: Any) -> float:
    return TokenPenalties(value).repetition_penalty


def _penalty_scope(name: str, value: Any) -> str:
    if value not in ("all", "generated"):
        raise ValueError(f'`{name}` has to be None, "all" or "generated", but is {shown(value)}.')
    return value


def _logprobs_mode(name: str, value: Any) -> str:
    if value not in LOGPROBS_MODES:
        raise ValueError(f"`{name}` has to be one of {LOGPROBS_MODES}, but is {shown(value)}.")
    return value


def _logit_bias(name: str, value: Any) -> dict[int, float] | None:
    try:
        return LogitBias(value).bias or None
    except (TypeError, ValueError) as error:
        raise type(error)(f"`{name}` cannot be used: {error}") from error


def _stop(name: str, value: Any) -> tuple[str, ...]:
    stop = (value,) if isinstance(value, str) else value
    if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
        raise TypeError(f"`{name}` has to be a text or a sequence of texts, but is {shown(value)}.")
    if "" in stop:
        raise ValueError(f"`{name}` has to hold no empty text, which would end every row at once: {shown(value)}.")
    if (size := sum(map(len, stop))) > MAX_STOP_CHARACTERS:
        raise ValueError(f"`{name}` has to hold at most {MAX_STOP_CHARACTERS} characters, but holds {size}.")
    check_characters(f"`{name}`", stop)
    return tuple(stop)


def check_characters(name: str, texts: Iterable[str]) -> None:
    """Refuses halves of surrogate pairs, which JSON can hold and no tokenizer reads. `name` begins the error."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} has to consist of characters, but holds half of a surrogate pair, "
                f"{shown(text[error.start])}, at place {error.start}."
            ) from None


def _stop_token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection):
        raise TypeError(f"`{name}` has to be a collection of ints, but is {shown(value)}.")
    return tuple(check_count(name, token_id, minimum=0) for token_id in value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` has to be a bool, but is {shown(value)}.")
    return value


def _tools(name: str, value: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) or callable(tool) for tool in value):
        raise TypeError(f"`{name}` has to be a list of JSON schemas or functions, but is {shown(value)}.")
    return tuple(value) or None


def _documents(name: str, value: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, Sequence) or not all(isinstance(document, Mapping) for document in value):
        raise TypeError(f"`{name}` has to be a list of mappings with `title` and `text`, but is {shown(value)}.")
    return tuple(value) or None


def _chat_template_kwargs(name: str, value: Any) -> dict[str, Any] | None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"`{name}` has to be a mapping of names to values, but is {shown(value)}.")
    if reserved := sorted(RESERVED_TEMPLATE_KEYS & set(value)):
        raise ValueError(f"`{name}` has to hold what only the template knows, but holds {reserved}.")
    return dict(value) or None


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "max_new_tokens": _optional(partial(check_count, maximum=MAX_COUNT)),
    "temperature": _temperature,
    "top_k": _optional(partial(check_count, minimum=0, maximum=MAX_COUNT), default=0),
    "top_p": _top_p,
    "min_p": _min_p,
    "repetition_penalty": _repetition_penalty,
    "frequency_penalty": checked_number,
    "presence_penalty": checked_number,
    "penalty_scope": _optional(_penalty_scope),
    "logit_bias": _optional(_logit_bias),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": _flag,
    "min_new_tokens": partial(check_count, minimum=0, maximum=MAX_COUNT),
    "seed": _optional(partial(check_count, minimum=MIN_SEED, maximum=MAX_SEED)),
    "n": partial(check_count, maximum=MAX_SAMPLES),
    "logprobs": _optional(partial(check_count, minimum=0, maximum=MAX_LOGPROBS)),
    "logprobs_mode": _logprobs_mode,
    "tools": _optional(_tools),
    "documents": _optional(_documents),
    "chat_template_kwargs": _optional(_chat_template_kwargs),
    "continue_final_message": _flag,
}
