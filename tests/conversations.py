"""One scripted conversation for each client that people use: streams, tools, schemas, stop strings, logprobs, leaving.

    python -m tests.conversations --url http://127.0.0.1:8000 [--model demo] [--key KEY]

Each raises AssertionError for what does not go as it should with a model that follows grammars, whatever it says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from tests.serve_endpoint import eventually_async

QUESTION = "Name three rivers, one sentence for each."
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Brno"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather of the next days.", "parameters": PARAMETERS}
NUM_TOKENS = 12
MANY_TOKENS = 60


class Trip(BaseModel):
    """A trip."""

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)
    by_train: bool


@dataclass(frozen=True)
class Endpoint:
    """Where the server is, and how to ask it."""

    url: str
    model: str
    key: str = "unused"

    async def is_idle(self) -> None:
        """Wait until nobody's answer is being computed any more."""
        headers = {"authorization": f"Bearer {self.key}"}

        def idle() -> bool:
            replicas = httpx.get(f"{self.url}/status", headers=headers, timeout=30).json()["replicas"]
            return not any(replica["engine"]["scheduler"]["num_running"] for replica in replicas)

        await eventually_async(idle)


async def with_openai(endpoint: Endpoint) -> None:
    """OpenAI's own client."""
    options: Mapping[str, Any] = {"model": endpoint.model, "temperature": 0, "max_tokens": NUM_TOKENS}
    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.key, max_retries=0) as client:
        chat = client.chat.completions
        whole = await chat.create(messages=asked, logprobs=True, top_logprobs=3, **options)
        text = whole.choices[0].message.content or ""
        chunks = [
            chunk
            async for chunk in await chat.create(
                messages=asked, stream=True, stream_options={"include_usage": True}, **options
            )
        ]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == NUM_TOKENS
        assert whole.choices[0].logprobs is not None
        tokens = whole.choices[0].logprobs.content or []
        assert b"".join(bytes(token.bytes or ()) for token in tokens).decode("utf-8", "replace").startswith(text)
        assert all(token.logprob == token.top_logprobs[0].logprob <= 0 for token in tokens), (
            "greedy takes the likeliest"
        )
        stop = text.split()[4]
        stopped = await chat.create(messages=asked, stop=stop, **options)
        assert stopped.choices[0].message.content == text[: text.index(stop)]
        assert stopped.choices[0].finish_reason == "stop"

        tools: Any = [{"type": "function", "function": {**WEATHER, "strict": True}}]
        options = {**options, "max_tokens": MANY_TOKENS}
        called = await chat.create(messages=asked, tools=tools, tool_choice="required", **options)
        call: Any = (called.choices[0].message.tool_calls or [])[0]
        _check(json.loads(call.function.arguments))
        result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
        follow_up = [*asked, called.choices[0].message, result]
        answer = await chat.create(
            messages=follow_up, tools=tools, tool_choice="none", **{**options, "max_tokens": NUM_TOKENS}
        )
        assert answer.choices[0].message.content
        parsed = await chat.parse(messages=asked, response_format=Trip, **options)
        assert isinstance(parsed.choices[0].message.parsed, Trip)

        async with await chat.create(messages=asked, stream=True, **{**options, "max_tokens": 900}) as stream:
            await anext(aiter(stream))
        await endpoint.is_idle()


async def with_anthropic(endpoint: Endpoint) -> None:
    """Anthropic's own client. Its API has no log-probabilities, and its newest client no temperature."""
    greedy = {"extra_body": {"temperature": 0}}
    options: Mapping[str, Any] = {"model": endpoint.model, "max_tokens": NUM_TOKENS, **greedy}
    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    async with anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
        whole = await client.messages.create(messages=asked, **options)
        (block,) = whole.content
        assert block.type == "text"
        async with client.messages.stream(messages=asked, **options) as stream:
            assert "".join([piece async for piece in stream.text_stream]) == block.text
        counted = await client.messages.count_tokens(model=endpoint.model, messages=asked)
        assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        stop = block.text.split()[4]
        stopped = await client.messages.create(messages=asked, stop_sequences=[stop], **options)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)

        options = {**options, "max_tokens": MANY_TOKENS}
        tools: Any = [{"name": "weather", "description": WEATHER["description"], "input_schema": PARAMETERS}]
        called = await client.messages.create(messages=asked, tools=tools, tool_choice={"type": "any"}, **options)
        (call,) = [block for block in called.content if block.type == "tool_use"][:1]
        _check(call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
        follow_up = [*asked, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        answer = await client.messages.create(
            messages=follow_up, tools=tools, tool_choice={"type": "none"}, **{**options, "max_tokens": NUM_TOKENS}
        )
        assert answer.content
        form: Any = {"format": {"type": "json_schema", "schema": PARAMETERS}}
        (formatted,) = (await client.messages.create(messages=asked, output_config=form, **options)).content
        assert formatted.type == "text"
        _check(json.loads(formatted.text))

        async with await client.messages.create(
            messages=asked, stream=True, **{**options, "max_tokens": 900}
        ) as events:
            await anext(aiter(events))
        await endpoint.is_idle()


async def with_langchain(endpoint: Endpoint) -> None:
    """LangChain's ChatOpenAI."""

    def model(**more: Any) -> ChatOpenAI:
        return ChatOpenAI(
            model=endpoint.model,
            base_url=f"{endpoint.url}/v1",
            api_key=SecretStr(endpoint.key),
            temperature=0,
            max_retries=0,
            **{"max_completion_tokens": NUM_TOKENS, **more},
        )

    asked = [HumanMessage(QUESTION)]
    whole = await model(logprobs=True, top_logprobs=2).ainvoke(asked)
    text = str(whole.content)
    assert len(whole.response_metadata["logprobs"]["content"]) == NUM_TOKENS
    assert "".join([str(piece.content) async for piece in model().astream(asked)]) == text
    stop = text.split()[4]
    assert (await model().ainvoke(asked, stop=[stop])).content == text[: text.index(stop)]

    long = model(max_completion_tokens=MANY_TOKENS)
    tool = {"type": "function", "function": WEATHER}
    called = await long.bind_tools([tool], tool_choice="any", strict=True).ainvoke(asked)
    assert isinstance(called, AIMessage)
    (call,) = called.tool_calls[:1]
    _check(call["args"])
    result = ToolMessage("Rain.", tool_call_id=str(call["id"]))
    called.tool_calls = [call]
    assert (await model().ainvoke([*asked, called, result])).content
    trip = await long.with_structured_output(Trip, method="json_schema", strict=True).ainvoke(asked)
    assert isinstance(trip, Trip)

    pieces = model(max_completion_tokens=900).astream(asked)
    await anext(pieces)
    await pieces.aclose()  # type: ignore[attr-defined]
    await endpoint.is_idle()


def _check(arguments: Any) -> None:
    """The arguments of a call to ``weather``."""
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in ("Paris", "Brno")
    assert 1 <= arguments["days"] <= 9


CONVERSATIONS: dict[str, Callable[[Endpoint], Awaitable[None]]] = {
    "openai": with_openai,
    "anthropic": with_anthropic,
    "langchain": with_langchain,
}


async def _hold_all(endpoint: Endpoint) -> None:
    for name, hold in CONVERSATIONS.items():
        started_s = time.perf_counter()
        await hold(endpoint)
        print(f"{name}: as it should be, {time.perf_counter() - started_s:.1f} s")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Scripted conversations of three clients with a running server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--key", default="unused")
    asked = parser.parse_args()
    asyncio.run(_hold_all(Endpoint(asked.url, asked.model, asked.key)))


if __name__ == "__main__":
    main()
