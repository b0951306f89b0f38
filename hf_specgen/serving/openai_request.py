"""Request bodies of OpenAI's API, with vLLM's additions, read into SamplingParams.

Knows the words of a body and nothing of prompts, models or answers.
"""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from ..arguments import check_count, shown
from .request_error import UNSUPPORTED_PARAMETER, RequestError, RequestTypeError, refused
from .sampling_params import SamplingParams

MAX_STOPS = 4
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
# Body -> SamplingParams. The last ones are vLLM's.
FIELDS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "n": "n",
    "seed": "seed",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "tools": "tools",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids",
    "documents": "documents",
    "chat_template_kwargs": "chat_template_kwargs",
    "continue_final_message": "continue_final_message",
}
READ_FIELDS = {"logprobs", "top_logprobs", "best_of", "tool_choice", "add_generation_prompt"}
# For whoever answers the request.
ANSWERING_FIELDS = {
    "model",
    "messages",
    "prompt",
    "stream",
    "stream_options",
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "service_tier",
    "request_id",
    "priority",
}
# What is not served, with the values that ask for nothing. Empty lists ask for nothing anywhere.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
    # vLLM
    "add_special_tokens": (False,),
    "detokenize": (True,),
    "include_reasoning": (True, False),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "use_beam_search": (False,),
}


def from_openai(body: Mapping[str, Any]) -> SamplingParams:
    """
    What the body of a request to `chat/completions` or `completions` asks of sampling and of the chat template. None
    stands for the default. As in vLLM, frequency and presence penalties count what was generated, and the repetition
    penalty the prompt too.

    Args:
        body (`Mapping[str, Any]`):
            The parsed JSON. Ids in `logit_bias` may be strings, and whole numbers are as good as fractions. What is
            for whoever answers, such as `model`, `messages`, `stream` and `user`, is not looked at.

    Raises:
        [`RequestError`], a `ValueError`, and a `TypeError` for wrong types: naming the fields that are not served, or
            the value that breaks a rule, with the code of OpenAI's API and the field as `param`.
    """
    if not isinstance(body, Mapping):
        raise RequestTypeError(f"`body` has to be a mapping, but is {shown(body)}.")
    given = {
        name: _plain(name, value) for name, value in body.items() if value is not None and name not in ANSWERING_FIELDS
    }
    given = {name: value for name, value in given.items() if value != [] or name in FIELDS}
    _check_numbers(given)
    if unserved := [name for name, value in given.items() if not _is_served(name, value, given)]:
        asked = ", ".join(f"{name}={shown(given[name])}" for name in unserved[:8])
        raise RequestError(
            f"`body` has to do without what is not served here, but asks for {asked}.",
            UNSUPPORTED_PARAMETER,
            unserved[0],
        )
    _check_agreement(given)
    settings = {FIELDS[name]: value for name, value in given.items() if name in FIELDS}
    settings["logprobs"] = _num_logprobs(given)
    if given.get("tool_choice") == "none":  # the model is not to know of them
        settings.pop("tools", None)
    if settings.get("top_k") == -1:  # vLLM's word for all tokens
        settings["top_k"] = 0
    try:
        return SamplingParams(**settings)
    except RequestError as error:
        names = {FIELDS[name]: name for name in given if name in FIELDS}
        message = str(error)
        for own, name in names.items():
            message = message.replace(f"`{own}`", f"`{name}`")
        raise refused(error, names.get(error.param or "", error.param), message) from error


def _plain(name: str, value: Any) -> Any:
    """A value of JSON, numbers as Python's own."""
    if isinstance(value, bool | str | Mapping | list | tuple):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    raise RequestTypeError(f"`{name}` has to be a value of JSON, but is {shown(value)}.", param=name)


def _is_served(name: str, value: Any, given: Mapping[str, Any]) -> bool:
    if name == "best_of":
        return value == given.get("n", 1)  # all of them are answered
    if name == "tool_choice":
        return value in ("none", "auto")
    if name == "add_generation_prompt":
        return value is (not given.get("continue_final_message", False))
    return name in FIELDS or name in READ_FIELDS or _is_neutral(value, NEUTRAL_VALUES.get(name, ()))


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


def _check_agreement(given: Mapping[str, Any]) -> None:
    """Refuses fields that contradict each other, and more stops than the API allows."""
    budgets = [given[name] for name in ("max_tokens", "max_completion_tokens") if name in given]
    if len(budgets) == 2 and budgets[0] != budgets[1]:
        raise RequestError(
            f"`max_tokens` and `max_completion_tokens` have to agree, but are {shown(budgets[0])} and "
            f"{shown(budgets[1])}.",
            param="max_tokens",
        )
    if isinstance(given.get("n"), int) and given["n"] > MAX_CHOICES:
        raise RequestError(f"`n` has to be at most {MAX_CHOICES}, but is {shown(given['n'])}.", param="n")
    if isinstance(given.get("stop"), list) and len(given["stop"]) > MAX_STOPS:
        raise RequestError(
            f"`stop` has to hold at most {MAX_STOPS} texts, but holds {len(given['stop'])}.", param="stop"
        )


def _check_numbers(given: Mapping[str, Any]) -> None:
    """Refuses NaN and infinite numbers, which Python reads although JSON has none."""
    for name, value in given.items():
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if isinstance(value, float) and not math.isfinite(value):
                raise RequestError(f"`{name}` has to consist of finite numbers, but holds {value}.", param=str(name))
            if isinstance(value, Mapping):
                waiting.extend(value.values())
            elif isinstance(value, (list, tuple)):
                waiting.extend(value)


def _num_logprobs(given: Mapping[str, Any]) -> int | None:
    """Chat bodies say whether and how many, plain ones how many."""
    logprobs, top = given.get("logprobs", False), given.get("top_logprobs", 0)
    if isinstance(logprobs, bool):
        name, count = "top_logprobs", top if logprobs else None
        if not logprobs and (isinstance(top, bool) or top != 0):
            raise RequestError(
                f"`logprobs` has to be true where `top_logprobs` is {shown(top)}, but is {logprobs}.", param="logprobs"
            )
    elif top != 0:
        raise RequestTypeError(
            f"`logprobs` has to be true where `top_logprobs` is given, but is {shown(logprobs)}.", param="logprobs"
        )
    else:
        name, count = "logprobs", logprobs
    if count is None:
        return None
    try:
        return check_count(name, count, minimum=0, maximum=MAX_TOP_LOGPROBS)
    except (TypeError, ValueError) as error:
        raise refused(error, name) from None
