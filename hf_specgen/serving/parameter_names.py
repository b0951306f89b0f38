"""Names of settings in OpenAI's API, vLLM, transformers and llama.cpp, for whoever gives them to `SamplingParams`."""

from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from .request_error import UNSUPPORTED_PARAMETER, RequestTypeError

T = TypeVar("T")

# What it is called here, or how to say it here.
HINTS = {
    "max_tokens": "it is called `max_new_tokens` here",
    "max_completion_tokens": "it is called `max_new_tokens` here",
    "max_length": "`max_new_tokens` counts the tokens behind the prompt",
    "n_predict": "it is called `max_new_tokens` here",
    "min_tokens": "it is called `min_new_tokens` here",
    "min_length": "`min_new_tokens` counts the tokens behind the prompt",
    "stop_strings": "it is called `stop` here",
    "eos_token_id": "`stop_token_ids` are added to the model's own, which `ignore_eos=True` leaves out",
    "num_return_sequences": "it is called `n` here",
    "best_of": "every one of `n` texts is returned; choose among them by `logprobs`",
    "do_sample": "`temperature=0` takes the best token each time, any other temperature samples",
    "repeat_penalty": "it is called `repetition_penalty` here",
    "top_logprobs": "it is called `logprobs` here",
    "output_scores": "`logprobs` reports log-probabilities",
    "prompt_logprobs": "log-probabilities are of generated tokens only",
    "include_stop_str_in_output": "the stop string is in `stop_reason` of the completion",
    "skip_special_tokens": "texts never hold special tokens; `token_ids` of the completion hold all",
    "bad_words": "`logit_bias` of -100 forbids a token",
    "bad_words_ids": "`logit_bias` of -100 forbids a token",
    "suppress_tokens": "`logit_bias` of -100 forbids a token",
    "num_beams": "there is no beam search here",
    "use_beam_search": "there is no beam search here",
    "enable_thinking": "give it in `chat_template_kwargs`",
}


def with_hints(kind: type[T]) -> type[T]:
    """A dataclass that refuses an unknown name with what it is called here, as a class decorator."""
    known = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    make: Callable[..., None] = kind.__init__

    @wraps(make)
    def make_or_hint(self: Any, *args: Any, **given: Any) -> None:
        if unknown := [name for name in given if name not in known]:
            message = _refusal(kind.__name__, unknown[0], known)
            raise RequestTypeError(message, UNSUPPORTED_PARAMETER, unknown[0])
        make(self, *args, **given)

    kind.__init__ = make_or_hint  # type: ignore[method-assign]
    return kind


def _refusal(owner: str, name: str, known: list[str]) -> str:
    if name in HINTS:
        return f"`{owner}` takes no `{name}`: {HINTS[name]}."
    if near := get_close_matches(name, known, n=1):
        return f"`{owner}` takes no `{name}`. Is `{near[0]}` meant?"
    return f"`{owner}` takes no `{name}`; it takes {', '.join(f'`{each}`' for each in known)}."
