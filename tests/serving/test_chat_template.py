"""What was said comes out of every kind of template, whichever form of contents it reads."""

import pytest

from hf_specgen.serving.chat_template import ChatTemplate
from hf_specgen.serving.request_error import RequestError
from tests.support.models import character_tokenizer

LINE = "{%% for m in messages %%}{{ m['role'] }}: %s\n{%% endfor %%}"
PARTS = "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
IF_TEXT = "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
FIRST = "{{ m['content'][0]['text'] }}"
TEMPLATES = {
    "prints a text": LINE % "{{ m['content'] }}",
    "joins a text": LINE % "{{ m['content'] + '' }}",
    "trims a text": LINE % "{{ m['content'] | trim }}",
    "dumps a text": LINE % "{{ m['content'] | tojson }}",
    "loops over parts": LINE % PARTS,
    "both": LINE % ("{% if m['content'] is string %}{{ m['content'] }}{% else %}" + PARTS + "{% endif %}"),
    "text or first part": LINE
    % ("{% if m['content'] is string %}{{ m['content'] }}{% else %}" + FIRST + "{% endif %}"),
    "first part": LINE % FIRST,
    "by role": LINE % ("{% if m['role'] == 'system' %}{{ m['content'] }}{% else %}" + PARTS + "{% endif %}"),
    "takes turns": "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('user first') }}{% endif %}"
    + LINE % "{{ m['content'] }}",
}


def template_of(text):
    tokenizer = character_tokenizer("?abcdefghijklmnop")
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer)


def as_parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("kind", TEMPLATES)
def test_texts_and_parts_come_out_as_what_was_said(kind):
    template = template_of(TEMPLATES[kind])
    texts = ["be nice", "hi", "yes?", "bye"]
    contents = [
        texts,
        [as_parts(text) for text in texts],
        [as_parts(text[:2], text[2:]) for text in texts],
        ["be nice", as_parts("h", "i"), "yes?", as_parts("bye")],
    ]
    roles = ["system", "user", "assistant", "user"]
    for first in (0, 1):  # with and without a system message
        rendered = {
            template.render([{"role": r, "content": c} for r, c in zip(roles[first:], form[first:])])
            for form in contents
        }
        quote = '"' if kind == "dumps a text" else ""
        lines = [f"{role}: {quote}{text}{quote}\n" for role, text in zip(roles[first:], texts[first:])]
        assert {text.replace("\n", "") for text in rendered} == {"".join(lines).replace("\n", "")}


def test_parts_are_passed_through_where_the_template_reads_them():
    template = template_of(LINE % "{% for p in m['content'] %}<{{ p['text'] }}>{{ p['mark'] }}{% endfor %}")
    first, second = as_parts("a", "b")
    message = {"role": "user", "content": [{**first, "mark": "!"}, second]}
    assert template.render([message]).strip() == "user: <a>!<b>"
    assert template.render([{"role": "user", "content": "ab"}]).strip() == "user: <ab>"


@pytest.mark.parametrize("role", ["tool", "developer", "critic"])
def test_other_roles_are_read_too(role):
    for kind in ("prints a text", "loops over parts"):
        for content in ("found", as_parts("fo", "und")):
            template = template_of(TEMPLATES[kind])
            user = {"role": "user", "content": "hi"}
            text = template.render([user, {"role": role, "content": content}])
            assert text.replace("\n", "") == f"user: hi{role}: found"
            assert len(template._forms) <= 3


def test_settings_reach_the_template():
    template = template_of(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}|{{ tools and tools[0]['function']['name'] }}|"
        "{{ documents and documents[0]['text'] }}|{{ thinking }}|{{ add_generation_prompt }}"
    )
    look = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    text = template.render(
        [{"role": "user", "content": "hi"}],
        tools=[look],
        documents=[{"title": "", "text": "page"}],
        thinking=False,
        add_generation_prompt=True,
    )
    assert text == "hi|look|page|False|True"


@pytest.mark.parametrize("kind", ["prints a text", "loops over parts", "both"])
@pytest.mark.parametrize("content", ["Once upon", as_parts("Once", " upon")])
def test_last_message_is_continued(kind, content):
    template = template_of(TEMPLATES[kind])
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": content}]
    assert template.render(messages, continue_final_message=True).endswith("Once upon")


def test_template_that_refuses_and_template_that_is_missing():
    message = {"role": "user", "content": as_parts("hi")}
    with pytest.raises(RequestError, match="cannot render.*not today"):
        template_of("{{ raise_exception('not today') }}").render([message])
    with pytest.raises(RequestError, match="cannot render"):
        template_of("{{ messages[5]['content'] + 'a' }}").render([message])
    with pytest.raises(RequestError, match="chat_template"):
        template_of(None).render([message])
    with pytest.raises(RequestError, match="'image'"):
        template_of(TEMPLATES["loops over parts"]).render([{"role": "user", "content": [{"type": "image"}]}])


def test_a_form_that_depends_on_the_place_of_a_message():
    loop = "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}"
    only_last = template_of(
        "{% for m in messages %}<{% if loop.last %}" + loop + "{% else %}{{ m['content'] }}{% endif %}>{% endfor %}"
    )
    for first, last in (("abc", "def"), (as_parts("a", "bc"), as_parts("de", "f"))):
        messages = [{"role": "user", "content": first}, {"role": "user", "content": last}]
        assert only_last.render(messages) == "<abc><def>"
