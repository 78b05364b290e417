"""Chats as clients send them, against templates as models bring them."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidParameterError, RequestError, UnsupportedModelError
from engine.text.chat_template import RESERVED_VARIABLES, ChatTemplate
from tests.unit.text_samples import with_template

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Gemma's kind: no system role, strict turns.
STRICT = """
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{{- '<' + m.role + '>' + m.content }}
{%- endfor %}"""
# Mistral's kind: one system message at the beginning, then strict turns.
LEADING = """
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- if messages[0].role == 'system' %}{{ '<system>' + messages[0].content }}{% endif %}
{%- for m in turns %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{{- '<' + m.role + '>' + m.content }}
{%- endfor %}"""
# Leaves out what it does not know, without a word.
SILENT = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
PARTS = "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
TEMPLATES = {"plain": PLAIN, "strict": STRICT, "leading": LEADING, "silent": SILENT, "parts": PARTS}


def chat(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def render(template: str, messages: list[dict[str, Any]], tools: Any = None, **kwargs: Any) -> str:
    return ChatTemplate({"default": template}, {}).render(messages, tools, **kwargs)


LATE = chat(("system", "S1"), ("user", "U1"), ("assistant", "A1"), ("system", "S2"), ("user", "U2"))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "messages",
    [
        pytest.param(LATE, id="late system"),
        pytest.param(chat(("developer", "S1"), ("user", "U1")), id="developer"),
        pytest.param(chat(("system", "S1"), ("developer", "S2"), ("user", "U1")), id="both"),
        pytest.param(chat(("user", "U1"), ("developer", "S1")), id="system last"),
        pytest.param(chat(("user", "U1"), ("user", "U2"), ("assistant", "A1"), ("user", "U3")), id="user twice"),
        pytest.param(chat(("system", "S1")), id="system alone"),
    ],
)
def test_no_template_refuses_or_loses_system_messages(template: str, messages: list[dict[str, Any]]) -> None:
    text = render(TEMPLATES[template], messages)
    places = [text.find(message["content"]) for message in messages]
    assert -1 not in places
    assert places == sorted(places)


def test_a_template_that_takes_the_messages_gets_them_as_they_are() -> None:
    assert render(PLAIN, LATE) == "<system>S1<user>U1<assistant>A1<system>S2<user>U2<assistant>"


def test_what_becomes_of_late_system_messages() -> None:
    assert render(LEADING, LATE) == "<system>S1<user>U1<assistant>A1<user>S2\n\nU2"
    assert render(STRICT, LATE) == "<user>S1\n\nU1<assistant>A1<user>S2\n\nU2"
    assert render(SILENT, LATE) == "<system>S1<user>U1<assistant>A1<user>S2\n\nU2"


def test_a_template_that_rewrites_content_is_trusted() -> None:
    rewriting = "{% for m in messages %}{{ m.role }}:{{ m.content | replace('b', 'B') }};{% endfor %}"
    assert render(rewriting, chat(("user", "a"), ("system", "b"))) == "user:a;system:B;"


@pytest.mark.parametrize("template", ["plain", "parts"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        ([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}], "hi"),
        ([{"type": "input_text", "text": "hi"}], "hi"),
        ([{"type": "refusal", "refusal": "hi"}], "hi"),
        (["h", "i"], "hi"),
        ([], ""),
        (None, ""),
    ],
)
def test_content_is_one_text(template: str, content: Any, text: str) -> None:
    rendered = render(TEMPLATES[template], chat(("user", content), ("assistant", "A"), ("user", "U")))
    assert rendered.startswith(f"<user>{text}<assistant>A")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:"}}], "image_url"),
        ([{"type": "text"}], "text"),
        ([{"type": "text", "text": 5}], "text"),
        ([{}], "None"),
        ([5], "int"),
        (5, "content"),
        ({"type": "text", "text": "hi"}, "content"),
    ],
)
def test_other_content_is_refused(content: Any, named: str) -> None:
    with pytest.raises(InvalidParameterError, match=named) as caught:
        render(PLAIN, chat(("user", content)))
    assert caught.value.param == "messages"


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="empty") as caught:
        render(PLAIN, [])
    assert caught.value.param == "messages"


def test_calls_are_objects_and_null_fields_are_absent() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.refusal is defined %}refusal{% endif %}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}} for text in ('{"a": 1}', "half {")
    ]
    message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}
    assert render(template, [*chat(("user", "u")), message]) == 'u{"a": 1}"half {"'
    assert calls[0]["function"]["arguments"] == '{"a": 1}', "the caller's messages stay as they were"


def test_tools_choose_their_own_template() -> None:
    template = ChatTemplate({"default": "d {{ messages[0].content }}", "tool_use": "t {{ tools | length }}"}, {})
    assert template.render(chat(("user", "x"))) == "d x"
    assert template.render(chat(("user", "x")), [{"type": "function"}]) == "t 1"
    assert template.render(chat(("user", "x")), []) == "d x"


def test_variables_reach_the_template() -> None:
    template = PLAIN + "{% if enable_thinking %}<think>{% endif %}"
    assert render(template, chat(("user", "x"))).endswith("<assistant>")
    assert render(template, chat(("user", "x")), enable_thinking=True).endswith("<assistant><think>")
    assert render(template, chat(("user", "x")), add_generation_prompt=False) == "<user>x"
    continued = chat(("user", "x"), ("assistant", "The answer is"))
    assert render(template, continued, continue_final_message=True).endswith("<assistant>The answer is")


@pytest.mark.parametrize("name", sorted(RESERVED_VARIABLES))
def test_a_request_cannot_replace_what_the_template_is_given(name: str) -> None:
    with pytest.raises(InvalidParameterError, match=name) as caught:
        ChatTemplate({"default": PLAIN}, {}).render(chat(("user", "x")), **{name: "{{ 7 * 7 }}"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "template",
    [
        pytest.param("{{ ''.__class__.__mro__ }}{{ messages[0].content }}", id="escape"),
        pytest.param("{{ messages[0].content.nothing.at_all }}", id="undefined"),
        pytest.param("{% for %}", id="syntax"),
        pytest.param("always the same", id="deaf"),
    ],
)
def test_a_template_that_cannot_work_is_refused_at_the_start(template: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        ChatTemplate({"default": template}, {})
    assert "/v1/completions" in caught.value.fix


def test_what_every_arrangement_fails_at_is_the_clients_error() -> None:
    template = (
        "{{ messages[0].content }}{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    )
    with pytest.raises(InvalidParameterError, match="one at a time") as caught:
        render(template, chat(("user", "a"), ("assistant", "b")))
    assert caught.value.param == "messages"


def test_without_a_template_the_remedy_is_named() -> None:
    with pytest.raises(RequestError, match="/v1/completions"):
        ChatTemplate({}, {}).render(chat(("user", "x")))


def test_special_tokens_in_a_template_become_tokens() -> None:
    tokenizer = with_template("{{ eos_token }}{{ messages[0].content }}", eos_token="<|end|>")
    row = tokenizer.apply_chat_template(chat(("user", "hi")))
    assert tokenizer.token_bytes(row[0]) == b"<|end|>"
    assert tokenizer.decode(row) == "hi"


def test_text_that_is_no_unicode_is_the_clients_error() -> None:
    with pytest.raises(InvalidParameterError, match="surrogate") as caught:
        with_template("{{ messages[0].content }}").apply_chat_template(chat(("user", "a\ud83d")))
    assert caught.value.param == "messages"
