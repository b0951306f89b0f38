"""Random bodies of requests: what clients send, bent in many ways."""

import random
from typing import Any

from hf_specgen.arguments import shown
from hf_specgen.serving.openai_request import ANSWERING_FIELDS, FIELDS, NEUTRAL_VALUES, READ_FIELDS

LOOK = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
USUAL: dict[str, list[Any]] = {
    "max_tokens": [1, 5, 100],
    "max_completion_tokens": [1, 5, 100],
    "temperature": [0, 0.7, 1, 2.0],
    "top_p": [1, 0.9],
    "n": [1, 2, 4],
    "seed": [0, -1, 2**63, 7],
    "stop": ["x", ["a", "b"], [], "\n\n"],
    "presence_penalty": [0, 1.5, -2],
    "frequency_penalty": [0, 0.5],
    "logit_bias": [{}, {"5": 3, "7": -100}],
    "tools": [[], [LOOK]],
    "tool_choice": ["auto", "none"],
    "top_k": [-1, 0, 5],
    "min_p": [0, 0.1],
    "repetition_penalty": [1, 1.2],
    "min_tokens": [0, 3],
    "ignore_eos": [True, False],
    "stop_token_ids": [[], [5, 6]],
    "documents": [[], [{"title": "a", "text": "b"}]],
    "chat_template_kwargs": [{}, {"enable_thinking": False}],
    "continue_final_message": [False, True],
    "add_generation_prompt": [True, False],
    "logprobs": [True, False, 0, 3],
    "top_logprobs": [0, 2],
    "best_of": [1, 2],
    "messages": [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "be nice"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": [LOOK]}],
    ],
    "prompt": ["hi", [5, 6, 7], ""],
}
NAMES = sorted({*FIELDS, *READ_FIELDS, *NEUTRAL_VALUES, *ANSWERING_FIELDS, "unheard_of", "max_new_tokens", ""})


def random_body(draw: random.Random) -> dict[str, Any]:
    """Some fields with usual values, and now and then one that is bent."""
    names = draw.sample(NAMES, draw.randint(1, 6)) + draw.sample(["messages", "prompt"], 1)
    return {name: _value(draw, name) for name in names}


def _value(draw: random.Random, name: str) -> Any:
    usual = [*USUAL.get(name, []), *NEUTRAL_VALUES.get(name, ())]
    if usual and draw.random() < 0.6:
        return draw.choice(usual)
    if usual and draw.random() < 0.5:
        return bent(draw, draw.choice(usual))
    return hostile(draw)


def bent(draw: random.Random, value: Any) -> Any:
    """The value with one thing in it replaced."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        new = draw.choice([key, shown(hostile(draw)), key.upper() if isinstance(key, str) else key])
        rest = {other: each for other, each in value.items() if other != key}
        return {**rest, new: bent(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        return [*value[:place], bent(draw, value[place]), *value[place + draw.randint(0, 1) :]]
    if isinstance(value, str) and draw.random() < 0.5:
        return value + draw.choice(["\ud800", "\x00", "😀", " " * 100, "<eos>", "{{ x }}"])
    return hostile(draw)


def hostile(draw: random.Random) -> Any:
    """Something that no field expects, or too much of what one does."""
    return draw.choice(
        [
            lambda: None,
            lambda: draw.choice([True, False]),
            lambda: draw.choice([0, 1, -1, 2**31, 2**63, -(2**63) - 1, 2**70, 10**5000]),
            lambda: draw.choice([0.0, -0.5, 1e-300, 1e308, float("nan"), float("inf"), -float("inf")]),
            lambda: draw.choice(["", "x", "\udfff", "a" * draw.choice([10, 20_000]), "\x00", "nan", "5"]),
            lambda: [],
            lambda: {},
            lambda: [hostile(draw) for _ in range(draw.randint(1, 3))],
            lambda: {draw.choice(["type", "role", "text", "5", ""]): hostile(draw) for _ in range(2)},
            lambda: _nested(draw.choice([10, 20_000])),
            lambda: [draw.choice([5, "x", 0.5, [], {}])] * draw.choice([10, 20_000]),
            lambda: {str(number): 1 for number in range(draw.choice([10, 5_000]))},
        ]
    )()


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value
