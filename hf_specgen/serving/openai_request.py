"""Request bodies of OpenAI's API, with vLLM's additions, read into SamplingParams.

Knows the words of a body and nothing of prompts, models or answers.
"""

from collections.abc import Mapping
from typing import Any

from ..engine.noise import MAX_SEED
from .sampling_params import SamplingParams

MAX_STOPS = 4
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
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_new_tokens",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids",
}
LOGPROBS_FIELDS = {"logprobs", "top_logprobs"}
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
    "service_tier",
    "request_id",
    "priority",
}
# What is not served, with the values that ask for nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    # vLLM
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "use_beam_search": (False,),
}


def from_openai(body: Mapping[str, Any]) -> SamplingParams:
    """
    What the body of a request to `chat/completions` or `completions` asks of sampling. None stands for the default.
    As in vLLM, frequency and presence penalties count what was generated, and the repetition penalty the prompt too.

    Args:
        body (`Mapping[str, Any]`):
            The parsed JSON. Ids in `logit_bias` may be strings; whole numbers are as good as fractions, and seeds may
            have 64 bits, of which 32 count. What is for whoever answers, such as `model`, `messages`, `stream` and
            `user`, is not looked at.

    Raises:
        `ValueError` or `TypeError`: naming the fields that are not served, or the value that breaks a rule.
    """
    if not isinstance(body, Mapping):
        raise TypeError(f"`body` has to be a mapping, but is {body!r}.")
    given = {name: value for name, value in body.items() if value is not None and name not in ANSWERING_FIELDS}
    if given.get("best_of") == given.get("n", 1):  # all of them are answered
        given.pop("best_of", None)
    unserved = [f"{name}={value!r}" for name, value in given.items() if not _is_served(name, value)]
    if unserved:
        raise ValueError(f"`body` has to do without what is not served here, but asks for {', '.join(unserved)}.")
    if given.get("max_tokens", given.get("max_completion_tokens")) != given.get(
        "max_completion_tokens", given.get("max_tokens")
    ):
        raise ValueError(
            f"`max_tokens` and `max_completion_tokens` have to agree, "
            f"but are {given['max_tokens']!r} and {given['max_completion_tokens']!r}."
        )
    if isinstance(given.get("stop"), list) and len(given["stop"]) > MAX_STOPS:
        raise ValueError(f"`stop` has to hold at most {MAX_STOPS} texts, but holds {len(given['stop'])}.")
    settings = {FIELDS[name]: value for name, value in given.items() if name in FIELDS}
    settings["logprobs"] = _num_logprobs(given)
    if settings.get("top_k") == -1:  # vLLM's word for all tokens
        settings["top_k"] = 0
    if type(settings.get("seed")) is int and settings["seed"] > MAX_SEED:
        settings["seed"] %= MAX_SEED + 1
    try:
        return SamplingParams(**settings)
    except (TypeError, ValueError) as error:
        raise type(error)(_in_words_of_body(str(error), given)) from error


def _is_served(name: str, value: Any) -> bool:
    return name in FIELDS or name in LOGPROBS_FIELDS or value in NEUTRAL_VALUES.get(name, ())


def _in_words_of_body(message: str, given: Mapping[str, Any]) -> str:
    for name in given:
        if name in FIELDS:
            message = message.replace(f"`{FIELDS[name]}`", f"`{name}`")
    return message


def _num_logprobs(given: Mapping[str, Any]) -> int | None:
    """Chat bodies say whether and how many, plain ones how many."""
    logprobs = given.get("logprobs", False)
    if "top_logprobs" in given:
        if logprobs is not True:
            raise ValueError(f"`logprobs` has to be true where `top_logprobs` is given, but is {logprobs!r}.")
        return given["top_logprobs"]
    if isinstance(logprobs, bool):
        return 0 if logprobs else None
    return logprobs
