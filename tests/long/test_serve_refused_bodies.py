"""Bodies that ask for nothing, or for what cannot be meant, are refused at once and never answered in silence."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidParameterError
from serve_app.ingress.error_bodies import MESSAGES_PATH
from serve_app.protocol import GenerateCall
from tests.serve_fakes import CHAT, EngineFleet, client_of

MESSAGES = {"model": "chain", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
RESPONSES = {"model": "chain", "max_output_tokens": 5, "input": "x"}
EMPTY = [{"role": "user", "content": []}]
ONLY_THOUGHT = [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]
TWINS = [{"name": "f", "input_schema": {}}] * 2


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("", {"messages": EMPTY}, "No message has any content"),
        ("", {"messages": ONLY_THOUGHT}, "No message has any content"),
        ("", {"tool_choice": {"type": "any"}}, "no `tools`"),
        ("", {"tool_choice": {"type": "tool"}}, "`name` belongs"),
        ("", {"tool_choice": {"type": "auto", "name": "f"}}, "`name` belongs"),
        ("", {"tool_choice": {"type": "tool", "name": "f"}}, "`f` is not among"),
        ("", {"tools": TWINS}, "same name"),
        ("", {"thinking": {"type": "disabled", "budget_tokens": 5}}, "`budget_tokens` belongs"),
        ("/count_tokens", {"messages": EMPTY}, "No message has any content"),
    ],
)
async def test_messages(path: str, body: dict[str, Any], said: str) -> None:
    asked = {**MESSAGES, **body}
    if path:
        del asked["max_tokens"]
    await _refused(f"{MESSAGES_PATH}{path}", asked, said)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": [{"type": "reasoning", "summary": []}]}, "nothing to answer"),
        ({"tool_choice": "required"}, "no `tools`"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "`f` is not among"),
        ({"tools": [{"type": "function", "name": "f"}] * 2}, "same name"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "`schema` belongs"),
    ],
)
async def test_responses(body: dict[str, Any], said: str) -> None:
    await _refused("/v1/responses", {**RESPONSES, **body}, said)


async def _refused(path: str, body: dict[str, Any], said: str) -> None:
    async with EngineFleet() as fleet:
        reply = await client_of(fleet, request_timeout_s=5.0).post(path, body)
    assert (reply.status, said in reply.json["error"]["message"]) == (400, True), reply.body


@pytest.mark.parametrize("count_only", [True, False])
async def test_a_call_with_nothing_to_answer_ends(count_only: bool) -> None:
    async with EngineFleet() as fleet:
        with pytest.raises(InvalidParameterError, match="nothing to answer"):
            async for _ in fleet.runner.generate(GenerateCall("c", "chain", count_only=count_only)):
                pass
        assert fleet.runner.num_open == 0


async def test_a_template_variable_that_is_none() -> None:
    await _refused("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"self": 1}}, "`self` cannot be set")
