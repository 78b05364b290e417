"""Tools and formats in chat requests: what is accepted, what is refused with its place, what it means."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidParameterError
from engine.request import Grammar
from serve_app.ingress.openai_types import ChatCompletionRequest
from tests.long.test_serve_openai_types import CHAT, chat, refusal

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DEEP: dict[str, Any] = {}
for _ in range(80):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": DEEP}, "chat_template_kwargs"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, None),
    ],
)
def test_tools_and_formats_are_checked(fields: dict[str, Any], param: str | None) -> None:
    if param is None:
        chat(**fields)
        return
    error = refusal(ChatCompletionRequest, {**CHAT, **fields})
    assert isinstance(error, InvalidParameterError)
    assert str(error.param).startswith(param)


@pytest.mark.parametrize(
    ("choice", "forced", "parallel"),
    [
        (None, (), True),
        ("auto", (), True),
        ("required", ("f", "g"), True),
        ({"type": "function", "function": {"name": "g"}}, ("g",), False),
    ],
)
def test_what_must_be_called(choice: Any, forced: tuple[str, ...], parallel: bool) -> None:
    second = {"type": "function", "function": {"name": "g", "description": "G", "strict": True}}
    use = chat(tools=[TOOL, second], tool_choice=choice).tool_use
    assert use is not None
    assert use.tools == (TOOL, second)
    assert (use.forced, use.parallel) == (forced, parallel)
    assert chat(tools=[TOOL], tool_choice="none").tool_use is None
    only_one = chat(tools=[TOOL], tool_choice=choice if isinstance(choice, str) else None, parallel_tool_calls=False)
    assert only_one.tool_use is not None
    assert not only_one.tool_use.parallel


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"a": 1}, "strict": True},
                }
            },
            Grammar("json_schema", '{"a": 1}'),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+", "structured_outputs")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a", "b"]', "structured_outputs")),
        ({"structured_outputs": {"grammar": "start: 1"}}, Grammar("grammar", "start: 1", "structured_outputs")),
        ({"structured_outputs": {"json": {"a": 1}}}, Grammar("json_schema", '{"a": 1}', "structured_outputs")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object", "", "structured_outputs")),
    ],
)
def test_what_the_answer_is_held_to(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert chat(**fields).sampling.grammar == grammar
