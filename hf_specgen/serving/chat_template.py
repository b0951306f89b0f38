"""ChatTemplate: conversations -> the text that a model reads, whatever form of contents its template expects."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..arguments import shown
from .messages import Content, checked_messages, text_of
from .request_error import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
PROBES = ("probe7", "text9")


@dataclass(frozen=True)
class _Forms:
    """Which forms of contents come out of a template as their text, neither lost nor printed as a list."""

    text: bool
    parts: bool
    one_part: bool

    def form(self, content: Content) -> Content:
        """The content in a form that is read; as it is where no form is."""
        if isinstance(content, list) and self.parts:
            return content
        text = text_of(content)
        if self.text or not (self.parts or self.one_part):
            return text
        return [text_part(text)]


class ChatTemplate:
    """
    The chat template of a tokenizer. Some templates print a content as it is, some loop over its parts, and either
    loses or spoils the other form without an error, so the form that each role wants is tried out with a probe.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Its `chat_template` is looked up at every call.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._forms: dict[tuple[str, str], _Forms] = {}  # by role and template

    def render(self, messages: Iterable[Any], **settings: Any) -> str:
        """
        The text of a conversation.

        Args:
            messages (`Iterable[Mapping[str, Any]]`):
                Messages with texts or parts as contents.
            settings (`dict[str, Any]`):
                For `apply_chat_template`: `add_generation_prompt`, `continue_final_message`, `tools`, `documents`, and
                what the template itself knows.

        Raises:
            [`RequestError`]: if there is no template, a message holds something other than text, or the template
                refuses the conversation.
        """
        if self._tokenizer.chat_template is None:
            raise RequestError(
                "Messages need a chat template, but `tokenizer.chat_template` is None. Set it, or give a text.",
                param="messages",
            )
        checked = checked_messages(messages)
        try:
            template = self._tokenizer.get_chat_template(tools=settings.get("tools"))
            formed = [
                {**message, "content": self._forms_of(message["role"], template).form(message["content"])}
                for message in checked
            ]
            text = self._apply(formed, settings)
            for number, message in enumerate(formed):  # what a template reads may depend on a message's place too
                if _is_printed_as_list(message["content"], text):
                    formed[number] = {**message, "content": text_of(message["content"])}
                    text = self._apply(formed, settings)
            return text
        except Exception as error:  # templates raise jinja2's errors, which are no ValueErrors
            raise RequestError(
                f"The chat template cannot render {shown(checked)}: {error}", param="messages"
            ) from error

    def _apply(self, messages: list[dict[str, Any]], settings: dict[str, Any]) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **settings)

    def _forms_of(self, role: str, template: str) -> _Forms:
        """What the template reads from messages of a role, tried once for the usual ones."""
        if (role, template) in self._forms:
            return self._forms[role, template]
        first, second = PROBES
        forms = _Forms(
            text=self._is_read(role, template, first),
            parts=self._is_read(role, template, [text_part(first), text_part(second)]),
            one_part=self._is_read(role, template, [text_part(first)]),
        )
        if role in ROLES:  # others are a client's choice
            self._forms[role, template] = forms
        return forms

    def _is_read(self, role: str, template: str, content: Content) -> bool:
        for asked in ("x", [text_part("x")]):
            try:
                text = self._apply(_conversation(role, content, asked), {"chat_template": template})
            except Exception:  # the template may refuse the probe for many reasons; the conversation itself will tell
                continue
            probes = PROBES[:1] if isinstance(content, str) else PROBES[: len(content)]
            if all(probe in text for probe in probes) and not _holds_keys(text):
                return True
        return False


def text_part(text: str) -> dict[str, Any]:
    """A part that is a text."""
    return {"type": "text", "text": text}


def _is_printed_as_list(content: Content, rendered: str) -> bool:
    return isinstance(content, list) and (str(content) in rendered or json.dumps(content) in rendered)


def _conversation(role: str, content: Content, asked: Content) -> list[dict[str, Any]]:
    """A short conversation in which a message of this role is in its place."""
    user, message = {"role": "user", "content": asked}, {"role": role, "content": content}
    if role in ("system", "developer"):
        return [message, user]
    if role == "assistant":
        return [user, message]
    if role == "tool":
        call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}
        message |= {"name": "look", "tool_call_id": "call00000"}
        return [user, {"role": "assistant", "content": asked, "tool_calls": [call]}, message]
    return [message]


def _holds_keys(text: str) -> bool:
    """Whether a part was printed with its keys, as `str` or `tojson` do."""
    before = text[: text.index(PROBES[0])]
    return before.endswith(("'text': '", '"text": "', '"text":"'))
