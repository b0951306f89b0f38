"""Contents of messages: texts and text parts are read, everything else is refused by name."""

import numpy as np
import pytest

from hf_specgen.serving.messages import are_messages, are_parts, checked_messages, text_of
from hf_specgen.serving.request_error import RequestError


def part(text):
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        ("", ""),
        ([part("hi")], "hi"),
        ([part("hi"), part(" there")], "hi there"),
        ((part("hi"),), "hi"),
        (np.array([part("hi")], dtype=object), "hi"),
        (["hi", " there"], "hi there"),
        ([{"text": "hi"}], "hi"),
        ([{"type": "input_text", "text": "hi"}, {"type": "output_text", "text": "!"}], "hi!"),
        ([{"type": "text", "text": "hi", "image_url": None}], "hi"),  # as a table fills it
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([part("hi"), part("")], "hi"),
    ],
)
def test_text_of_a_content(content, text):
    assert text_of(content) == text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "'image_url'"),
        ([part("hi"), {"type": "image"}], "part 1, is 'image'"),
        ([{"type": "input_audio", "input_audio": {}}], "'input_audio'"),
        ([{"type": "video"}], "'video'"),
        ([{"type": "file", "file": {}}], "'file'"),
        ([{"image": "x"}], "'image'"),
        ([{"type": None, "image": "x"}], "'image'"),
        ([{"type": "text", "text": None}], "`text`"),
        ([{"type": "text"}], "`text`"),
        ([{"type": "text", "text": 5}], "`text`"),
        ([{"type": "text", "text": ["hi"]}], "`text`"),
        ([], "no parts"),
        (None, "None"),
        (5, "5"),
        (b"hi", "hi"),
        ([5], "5"),
        ([None], "None"),
        ([["hi"]], "hi"),
        (part("hi"), "list of parts"),
    ],
)
def test_content_that_is_no_text_is_refused_by_name(content, words):
    for read in (
        lambda: text_of(content, "Message 3"),
        lambda: checked_messages([{"role": "user", "content": content}]),
    ):
        with pytest.raises(RequestError, match="^Message [03]") as raised:
            read()
        assert words in str(raised.value) and raised.value.param == "messages"


@pytest.mark.parametrize("message", [None, "hi", 5, ["hi"], {}, {"content": "hi"}, {"role": None, "content": "hi"}])
def test_what_is_no_message_is_refused_by_its_number(message):
    with pytest.raises(RequestError, match="^Message 1 "):
        checked_messages([{"role": "user", "content": "hi"}, message])


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_message_that_says_nothing_is_refused(content):
    with pytest.raises(RequestError, match="^Message 0 "):
        checked_messages([{"role": "user", **content}])


def test_message_of_tool_calls_needs_no_content():
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    (message,) = checked_messages([{"role": "assistant", "content": None, "tool_calls": [call], "name": None}])
    parsed = {**call, "function": {"name": "look", "arguments": {"at": "sky"}}}
    assert message == {"role": "assistant", "content": "", "tool_calls": [parsed]}
    assert call["function"]["arguments"] == '{"at": "sky"}'
    (message,) = checked_messages([{"role": "assistant", "content": None, "refusal": "no"}])
    assert message == {"role": "assistant", "content": "no"}


def test_kinds_of_lists():
    assert are_messages([{"role": "user"}]) and are_messages(np.array([{"role": "user"}], dtype=object))
    assert not are_messages([]) and not are_messages("ab") and not are_messages([5]) and not are_messages([part("x")])
    assert are_parts([part("x")]) and not are_parts([]) and not are_parts([{"role": "user", "type": "x"}])
