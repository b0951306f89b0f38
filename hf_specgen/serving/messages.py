"""Chat messages: their contents as texts and as parts, checked. Knows no template and no tokenizer."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..arguments import shown
from .request_error import UNSUPPORTED_VALUE, RequestError, RequestTypeError

Content = str | list[dict[str, Any]]  # a text, or parts `{"type": "text", "text": ...}`
TEXT_PARTS = ("text", "input_text", "output_text")  # chat completions, and the two of OpenAI's responses
STANDS_FOR_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


def are_messages(value: Any) -> bool:
    """Whether it is a conversation: a sequence of mappings, each with a role."""
    if not is_sequence(value) or len(value) == 0:
        return False
    return all(isinstance(message, Mapping) and "role" in message for message in value)


def are_parts(value: Any) -> bool:
    """Whether it is the content of a message in parts, without the message."""
    if not is_sequence(value) or len(value) == 0:
        return False
    return all(isinstance(part, Mapping) and "type" in part and "role" not in part for part in value)


def is_sequence(value: Any) -> bool:
    """Whether it is a list or what tables have in place of one, but no text."""
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping)):
        return False
    return isinstance(value, Sequence) or (hasattr(value, "tolist") and isinstance(value, Iterable))


def checked_messages(messages: Iterable[Any]) -> list[dict[str, Any]]:
    """
    The messages of a conversation with contents that are texts or lists of text parts, and without keys that are None,
    with which tables fill what only other messages have.

    Raises:
        [`RequestError`]: naming the message, for contents that are no text, such as images, and for messages that say
            nothing.
    """
    return [_checked_message(message, f"Message {number}") for number, message in enumerate(messages)]


def text_of(content: Any, where: str = "A message") -> str:
    """The text of a content: itself, or its parts joined. `where` begins the sentence of an error."""
    content = _checked_content(content, where)
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestTypeError(
            f"{where} has to be a mapping with `role` and `content`, but is {shown(message)}.", param="messages"
        )
    known = {key: value for key, value in message.items() if value is not None}
    if not isinstance(known.get("role"), str) or not known["role"]:
        raise RequestError(f"{where} has to name its `role`, but is {shown(dict(message))}.", param="messages")
    if "content" not in known and isinstance(known.get("refusal"), str):
        known["content"] = known.pop("refusal")
    if "content" not in known and any(name in known for name in STANDS_FOR_CONTENT):
        known["content"] = ""
    known["content"] = _checked_content(known.get("content"), where)
    if is_sequence(known.get("tool_calls")):
        known["tool_calls"] = [_with_parsed_arguments(call) for call in known["tool_calls"]]
    return known


def _checked_content(content: Any, where: str) -> Content:
    if isinstance(content, str):
        return content
    if not is_sequence(content):
        raise RequestTypeError(
            f"{where} has to have a text or a list of parts as `content`, but has {shown(content)}.", param="messages"
        )
    if len(content) == 0:
        raise RequestError(f"{where} has to say something, but has no parts.", param="messages")
    return [_checked_part(part, f"{where}, part {number},") for number, part in enumerate(content)]


def _checked_part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise RequestTypeError(f"{where} has to be a mapping with a `type`, but is {shown(part)}.", param="messages")
    known = {key: value for key, value in part.items() if value is not None}
    kind = known.get("type", "text" if set(known) == {"text"} else None)
    if kind == "refusal" and isinstance(known.get("refusal"), str):
        kind, known = "text", {"text": known["refusal"]}
    if kind not in TEXT_PARTS:
        named = shown(kind) if kind is not None else f"of the keys {shown(sorted(map(str, known)))}"
        raise RequestError(f"{where} is {named}, but only text is read here.", UNSUPPORTED_VALUE, "messages")
    if not isinstance(known.get("text"), str):
        raise RequestTypeError(f"{where} has to hold its `text`, but is {shown(dict(part))}.", param="messages")
    return {**known, "type": "text"}


def _with_parsed_arguments(call: Any) -> Any:
    """A tool call with its arguments as templates read them; clients send them as a JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
