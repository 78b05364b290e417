"""Tools, formats and thinking over HTTP, with OpenAI's own client: the same answer whole and streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from serve_app.ingress.http_app import build_http_app
from tests.core_fakes import make_core
from tests.serve_fakes import SETTINGS, TEMPLATE, EngineFleet, SpeakingRunner

ASK: dict[str, Any] = {"model": "chain", "messages": [{"role": "user", "content": "hello"}]}
FIND: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
CALL = '<tool_call>{"name": "find", "arguments": {"text": "žluťoučký 🐎"}}</tool_call>'


@asynccontextmanager
async def speaking(text: str, template: str = TEMPLATE) -> AsyncIterator[tuple[openai.AsyncOpenAI, SpeakingRunner]]:
    """A client of a server whose model says ``text``."""
    runner = SpeakingRunner(text)
    settings = replace(SETTINGS, max_body_bytes=2**20)
    async with EngineFleet(make_core(runner, num_blocks=2048), template=template) as fleet:
        transport = httpx.ASGITransport(build_http_app(fleet, settings))
        async with openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="x", max_retries=0, http_client=httpx.AsyncClient(transport=transport)
        ) as client:
            yield client, runner


async def both_ways(client: openai.AsyncOpenAI, **asked: Any) -> dict[str, Any]:
    """The message and finish reason, after checking that they are the same whole and streamed."""
    whole = (await client.chat.completions.create(**asked)).choices[0]
    message: dict[str, Any] = whole.message.model_dump(exclude_none=True)
    found = {
        "content": whole.message.content,
        "calls": [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()],
        "thinking": message.get("reasoning_content", ""),
        "reason": whole.finish_reason,
    }
    assert message.get("reasoning_content") == message.get("reasoning")
    streamed: dict[str, Any] = {"content": "", "thinking": "", "calls": [], "reason": None}
    ids: list[str] = []
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        assert streamed["reason"] is None
        streamed["content"] += choice.delta.content or ""
        streamed["thinking"] += (choice.delta.model_extra or {}).get("reasoning_content", "")
        streamed["reason"] = choice.finish_reason
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.index == len(ids):
                assert call.id
                assert call.type == "function"
                ids.append(call.id)
                streamed["calls"].append([call.function.name, ""])
            else:
                assert call.id is None
                assert call.function.name is None
            streamed["calls"][call.index][1] += call.function.arguments or ""
    assert len(set(ids)) == len(ids)
    assert streamed["content"] == (found["content"] or "")
    assert [tuple(call) for call in streamed["calls"]] == found["calls"]
    assert (streamed["thinking"], streamed["reason"]) == (found["thinking"], found["reason"])
    return found


async def test_a_call_is_a_call_and_no_text() -> None:
    async with speaking(CALL) as (client, runner):
        found = await both_ways(client, **ASK, tools=[FIND, ADD])
        assert found["content"] is None
        assert found["calls"] == [("find", '{"text": "žluťoučký 🐎"}')]
        assert found["reason"] == "tool_calls"
        assert "Look something up." in runner.prompt


async def test_text_and_parallel_calls() -> None:
    async with speaking(f'I look.\n{CALL}\n<tool_call>{{"name": "add", "arguments": {{}}}}</tool_call>') as (client, _):
        found = await both_ways(client, **ASK, tools=[FIND, ADD])
        assert found["content"] == "I look."
        assert [name for name, _ in found["calls"]] == ["find", "add"]


@pytest.mark.parametrize("max_tokens", [5, 30, len(CALL.encode()) - 3])
async def test_a_call_cut_by_the_limit_is_no_call(max_tokens: int) -> None:
    async with speaking(CALL) as (client, _):
        found = await both_ways(client, **ASK, tools=[FIND], max_tokens=max_tokens)
        assert (found["calls"], found["reason"]) == ([], "length")


@pytest.mark.parametrize("text", ["<tool_call>{broken</tool_call>", CALL.replace("find", "gone")])
async def test_what_cannot_be_run_stays_text(text: str) -> None:
    async with speaking(text) as (client, _):
        found = await both_ways(client, **ASK, tools=[FIND])
        assert found == {"content": text, "calls": [], "thinking": "", "reason": "stop"}


async def test_without_tools_nothing_is_a_call() -> None:
    async with speaking(CALL) as (client, runner):
        for more in ({}, {"tools": [FIND], "tool_choice": "none"}):
            assert (await both_ways(client, **ASK, **more))["content"] == CALL
            assert "Look something up." not in runner.prompt


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
async def test_a_forced_call_is_held_to_the_functions_schema(choice: Any) -> None:
    async with speaking('[{"name": "find", "arguments": {"text": "x"}}]') as (client, runner):
        found = await both_ways(client, **ASK, tools=[FIND], tool_choice=choice)
        assert found["calls"] == [("find", '{"text": "x"}')]
        assert found["reason"] == "tool_calls"
        grammar = runner.rows[-1].sampling.grammar
        assert grammar is not None
        assert "maxItems" in grammar.text or choice == "required"


async def test_calls_and_their_results_go_back_to_the_model() -> None:
    history = [
        *ASK["messages"],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"text": "x"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "found it"},
    ]
    async with speaking("ok") as (client, runner):
        found = await both_ways(client, model="chain", messages=history, tools=[FIND])
        assert found["content"] == "ok"
        assert '<tool_call>{"name": "find", "arguments": {"text": "x"}}</tool_call>' in runner.prompt
        assert "found it" in runner.prompt


@pytest.mark.parametrize(
    ("more", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}},
            "response_format",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}, "tools": [FIND]}, "structured_outputs"),
        ({"extra_body": {"thinking_token_budget": 5}}, "thinking_token_budget"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
            "tools[0].function.parameters",
        ),
    ],
)
async def test_what_cannot_be_followed_is_refused_with_its_place(more: dict[str, Any], param: str) -> None:
    async with speaking("x") as (client, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**ASK, **more)
        assert caught.value.param == param


async def test_formats_reach_the_engine() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with speaking('{"a": 1}') as (client, runner):
        asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
        found = await both_ways(client, **ASK, response_format=asked)
        assert json.loads(found["content"]) == {"a": 1}
        grammar = runner.rows[-1].sampling.grammar
        assert grammar is not None
        assert json.loads(grammar.text) == schema


THINKS = TEMPLATE + "{# <think></think> #}{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"


async def test_thinking_is_told_apart_from_the_answer() -> None:
    async with speaking("<think>\nhm\n</think>\n\nYes.", THINKS) as (client, _):
        found = await both_ways(client, **ASK)
        assert (found["thinking"], found["content"]) == ("hm", "Yes.")


async def test_thinking_may_begin_in_the_prompt_and_end_in_a_call() -> None:
    async with speaking(f"hm</think>{CALL}", THINKS + "<think>\n") as (client, _):
        found = await both_ways(client, **ASK, tools=[FIND])
        assert (found["thinking"], found["content"], found["reason"]) == ("hm", None, "tool_calls")


async def test_effort_budget_and_variables_reach_template_and_engine() -> None:
    async with speaking("Yes.", THINKS) as (client, runner):
        await client.chat.completions.create(**ASK, reasoning_effort="none")
        assert runner.prompt.endswith("[False]")
        more = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 9}
        await client.chat.completions.create(**ASK, extra_body=more)
        assert runner.prompt.endswith("[True]")
        thinking = runner.rows[-1].sampling.thinking
        assert thinking is not None
        assert (bytes(thinking.end), thinking.budget_tokens) == (b"</think>", 9)


async def test_thinking_is_counted() -> None:
    async with speaking("<think>hm</think>Yes.", THINKS) as (client, _):
        whole = await client.chat.completions.create(**ASK)
        assert whole.usage is not None
        assert whole.usage.completion_tokens_details is not None
        assert whole.usage.completion_tokens_details.reasoning_tokens == len("<think>hm</think>") - len("<think")
        assert whole.usage.completion_tokens == len("<think>hm</think>Yes.") + 1


async def test_what_was_thought_goes_back_to_templates_that_take_it() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}({{ m.reasoning_content }})\n{% endfor %}>"
    history = [*ASK["messages"], {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}, *ASK["messages"]]
    async with speaking("ok", template) as (client, runner):
        await client.chat.completions.create(model="chain", messages=history)  # type: ignore[arg-type]
        assert "assistant:Yes.(hm)" in runner.prompt


CHANNELS = TEMPLATE + "{% if tools %}{{ tools[0].function.description }}{% endif %}{# <|channel|> <|message|> #}"
COMMENTARY = '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"text": "x"}'


async def test_channels_are_thinking_text_and_calls() -> None:
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    async with speaking(f"{thought}<|channel|>final<|message|>Yes.", CHANNELS) as (client, _):
        found = await both_ways(client, **ASK)
        assert (found["thinking"], found["content"]) == ("hm", "Yes.")
    async with speaking(thought + COMMENTARY, CHANNELS) as (client, runner):
        found = await both_ways(client, **ASK, tools=[FIND])
        assert (found["thinking"], found["content"], found["reason"]) == ("hm", None, "tool_calls")
        assert found["calls"] == [("find", '{"text": "x"}')]
        assert "Look something up." in runner.prompt
        cut = await both_ways(client, **ASK, tools=[FIND], max_tokens=len(thought + COMMENTARY) - 2)
        assert (cut["calls"], cut["reason"]) == ([], "length")


async def test_an_answer_may_be_a_call_and_nothing_else() -> None:
    template = TEMPLATE + "{% if tools %}{{ tools[0].function.description }}{% endif %}"
    async with speaking('{"name": "find", "parameters": {"text": "x"}}', template) as (client, _):
        found = await both_ways(client, **ASK, tools=[FIND])
        assert (found["content"], found["calls"]) == (None, [("find", '{"text": "x"}')])


async def test_one_call_at_a_time_where_that_is_asked() -> None:
    async with speaking(CALL * 2) as (client, _):
        assert len((await both_ways(client, **ASK, tools=[FIND]))["calls"]) == 2
        assert len((await both_ways(client, **ASK, tools=[FIND], parallel_tool_calls=False))["calls"]) == 1


async def test_a_format_and_tools_go_together() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for text, content, num_calls in (('{"a": 1}', '{"a": 1}', 0), (CALL, None, 1)):
        async with speaking(text) as (client, runner):
            found = await both_ways(client, **ASK, tools=[FIND], response_format=asked)
            assert (found["content"], len(found["calls"])) == (content, num_calls)
            grammar = runner.rows[-1].sampling.grammar
            assert grammar is not None
            assert grammar.kind == "grammar"
