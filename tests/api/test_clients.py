"""Conversations with the vendors' own clients: Anthropic's, OpenAI's newer API, LangChain."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from starlette.types import ASGIApp

from serve_app.ingress.anthropic_types import MessagesRequest
from serve_app.ingress.embeddings import EmbeddingsRequest
from serve_app.ingress.http_app import build_http_app
from serve_app.ingress.openai_types import ChatCompletionRequest, CompletionRequest
from serve_app.ingress.responses_types import ResponsesRequest
from tests.api.test_tools import CALL, FIND
from tests.core_fakes import make_core
from tests.serve_fakes import SETTINGS, EngineFleet, SpeakingRunner

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
SCHEMA = FIND["function"]["parameters"]
CLAUDE_TOOL: dict[str, Any] = {"name": "find", "description": "Look something up.", "input_schema": SCHEMA}
FLAT_TOOL: dict[str, Any] = {"type": "function", **FIND["function"]}
ARGUMENTS = {"text": "žluťoučký 🐎"}
FORCED = '[{"name": "find", "arguments": {"text": "x"}}]'


@asynccontextmanager
async def serving(text: str) -> AsyncIterator[tuple[ASGIApp, SpeakingRunner]]:
    """A server whose model says ``text``."""
    runner = SpeakingRunner(text)
    async with EngineFleet(make_core(runner, num_blocks=2048)) as fleet:
        yield build_http_app(fleet, replace(SETTINGS, max_body_bytes=2**20)), runner


@asynccontextmanager
async def claude(text: str) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, SpeakingRunner]]:
    async with serving(text) as (app, runner):
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
        async with anthropic.AsyncAnthropic(
            base_url="http://t", api_key="x", max_retries=0, http_client=http
        ) as client:
            yield client, runner


@asynccontextmanager
async def gpt(text: str) -> AsyncIterator[tuple[openai.AsyncOpenAI, SpeakingRunner]]:
    async with serving(text) as (app, runner):
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        async with openai.AsyncOpenAI(base_url="http://t/v1", api_key="x", max_retries=0, http_client=http) as client:
            yield client, runner


async def both_messages(client: anthropic.AsyncAnthropic, **asked: Any) -> anthropic.types.Message:
    """The message, after checking that it is the same whole and streamed."""
    asked = {"model": "chain", "max_tokens": 500, "messages": HELLO, **asked}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    assert [_plain(block) for block in streamed.content] == [_plain(block) for block in whole.content]
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    return whole


def _plain(block: Any) -> dict[str, Any]:
    values: dict[str, Any] = block.model_dump(exclude_none=True)
    values.pop("id", None)
    return values


async def test_messages_say_text_and_why_it_ended() -> None:
    async with claude("Hello, wörld. STOP here") as (client, runner):
        message = await both_messages(client, system="Be kind.")
        assert [_plain(block) for block in message.content] == [{"type": "text", "text": "Hello, wörld. STOP here"}]
        assert message.stop_reason == "end_turn"
        assert "Be kind." in runner.prompt
        cut = await both_messages(client, max_tokens=5)
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 5)
        stopped = await both_messages(client, stop_sequences=["STOP"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")


async def test_messages_call_tools() -> None:
    async with claude(f"I look. {CALL}") as (client, _):
        message = await both_messages(client, tools=[CLAUDE_TOOL])
        assert [_plain(block) for block in message.content] == [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "name": "find", "input": ARGUMENTS},
        ]
        assert message.stop_reason == "tool_use"
        assert len({block.id for block in message.content if block.type == "tool_use"}) == 1


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "find"}])
async def test_messages_can_be_made_to_call(choice: dict[str, Any]) -> None:
    async with claude(FORCED) as (client, _):
        message = await both_messages(client, tools=[CLAUDE_TOOL], tool_choice=choice)
        assert [_plain(block) for block in message.content] == [
            {"type": "tool_use", "name": "find", "input": {"text": "x"}}
        ]


async def test_messages_take_results_back() -> None:
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "t1", "content": "found it"}
    history: list[dict[str, Any]] = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "find", "input": {"text": "x"}}]},
        {"role": "user", "content": [result]},
    ]
    async with claude("ok") as (client, runner):
        await both_messages(client, messages=history, tools=[CLAUDE_TOOL])
        assert "found it" in runner.prompt
        assert "Error" not in runner.prompt
        assert '"find"' in runner.prompt
        result["is_error"] = True
        await both_messages(client, messages=history, tools=[CLAUDE_TOOL])
        assert "Error: found it" in runner.prompt


async def test_a_stream_says_first_what_the_prompt_took() -> None:
    async with claude("ok") as (client, _):
        asked: dict[str, Any] = {"model": "chain", "max_tokens": 5, "messages": HELLO}
        counted = await client.messages.count_tokens(model="chain", messages=HELLO)  # type: ignore[arg-type]
        async for event in await client.messages.create(**asked, stream=True):
            if event.type == "message_start":
                assert event.message.usage.input_tokens == counted.input_tokens
                assert event.message.usage.output_tokens == 0


async def test_tokens_are_counted_as_they_are_billed() -> None:
    async with claude("ok") as (client, _):
        counted = await client.messages.count_tokens(model="chain", messages=HELLO, tools=[CLAUDE_TOOL])  # type: ignore[arg-type,list-item]
        used = (await both_messages(client, tools=[CLAUDE_TOOL])).usage
        assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"messages": []}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, anthropic.BadRequestError),
        ({"tools": [CLAUDE_TOOL], "tool_choice": {"type": "tool", "name": "g"}}, anthropic.BadRequestError),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, anthropic.BadRequestError),
        ({"output_config": {"effort": "high"}}, anthropic.BadRequestError),
    ],
)
async def test_messages_are_refused_in_their_own_shape(changes: dict[str, Any], error: type[Exception]) -> None:
    async with claude("ok") as (client, _):
        with pytest.raises(error) as caught:
            await client.messages.create(**{"model": "chain", "max_tokens": 5, "messages": HELLO, **changes})
        body: Any = caught.value.body  # type: ignore[attr-defined]
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}


async def both_responses(client: openai.AsyncOpenAI, **asked: Any) -> Any:
    """The response, after checking that it is the same whole and streamed, and that events are numbered."""
    asked = {"model": "chain", "input": "hello", **asked}
    whole = await client.responses.create(**asked)
    numbers, deltas, last = [], "", None
    async for event in await client.responses.create(**asked, stream=True):
        numbers.append(event.sequence_number)
        last = event
        if event.type == "response.output_text.delta":
            deltas += event.delta
    assert numbers == list(range(len(numbers)))
    assert last is not None
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text == deltas
    assert [item.type for item in last.response.output] == [item.type for item in whole.output]
    return whole


async def test_responses_say_text() -> None:
    async with gpt("Hello, wörld.") as (client, runner):
        response = await both_responses(client, instructions="Be kind.", store=False)
        assert response.output_text == "Hello, wörld."
        assert response.usage.output_tokens == len("Hello, wörld.".encode()) + 1
        assert "Be kind." in runner.prompt
        cut = await both_responses(client, max_output_tokens=4)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_responses_call_functions_and_take_results_back() -> None:
    async with gpt(CALL) as (client, runner):
        response = await both_responses(client, tools=[FLAT_TOOL])
        (call,) = response.output
        assert (call.type, call.name) == ("function_call", "find")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "found it"}
        history = [*HELLO, call.model_dump(exclude_none=True), result]
        await both_responses(client, input=history, tools=[FLAT_TOOL])
        assert "found it" in runner.prompt
        async with client.responses.stream(model="chain", input="hello", tools=[FLAT_TOOL]) as stream:  # type: ignore[list-item]
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["function_call"]


@pytest.mark.parametrize(
    "more",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"truncation": "auto"},
        {"tools": [{"type": "web_search"}]},
    ],
)
async def test_responses_refuse_what_is_not_here(more: dict[str, Any]) -> None:
    async with gpt("ok") as (client, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="chain", input="hello", **more)
        assert str(caught.value.param).startswith(next(iter(more)))


async def test_embeddings_are_refused_with_the_reason() -> None:
    async with gpt("ok") as (client, _):
        with pytest.raises(openai.BadRequestError, match="no embeddings"):
            await client.embeddings.create(model="chain", input="hello")


@asynccontextmanager
async def chain(text: str) -> AsyncIterator[ChatOpenAI]:
    async with serving(text) as (app, _):
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        yield ChatOpenAI(model="chain", base_url="http://t/v1", api_key="x", max_retries=0, http_async_client=http)  # type: ignore[arg-type]


async def test_langchain_talks_streams_and_calls() -> None:
    async with chain("Hello, wörld.") as model:
        assert (await model.ainvoke([HumanMessage("hello")])).content == "Hello, wörld."
        pieces = [piece.content async for piece in model.astream("hello")]
        assert "".join(map(str, pieces)) == "Hello, wörld."
    async with chain(CALL) as model:
        answer = await model.bind_tools([FIND]).ainvoke("hello")
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("find", ARGUMENTS)]


async def test_langchain_gets_structured_output() -> None:
    async with chain('{"text": "x"}') as model:
        schema = {"title": "found", "description": "d", **SCHEMA}
        answer = await model.with_structured_output(schema, method="json_schema").ainvoke("hello")
        assert answer == {"text": "x"}


GPT = openai.OpenAI(api_key="x")
NOT_OF_THE_BODY = {"extra_headers", "extra_query", "extra_body", "timeout", "workspace_id"}


@pytest.mark.parametrize(
    ("create", "request_model"),
    [
        (GPT.chat.completions.create, ChatCompletionRequest),
        (GPT.completions.create, CompletionRequest),
        (GPT.responses.create, ResponsesRequest),
        (GPT.embeddings.create, EmbeddingsRequest),
        (anthropic.Anthropic(api_key="x").messages.create, MessagesRequest),
    ],
)
def test_every_parameter_of_the_vendors_clients_is_a_known_field(create: Any, request_model: type[BaseModel]) -> None:
    assert set(inspect.signature(create).parameters) - NOT_OF_THE_BODY <= set(request_model.model_fields)
