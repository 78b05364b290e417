"""The HTTP application over fleets without Ray: statuses, shapes, and what happens when a client leaves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engine.errors import AdmissionRefusedError, ContextLengthError, EngineDeadError, StepFailedError
from serve_app.errors import ReplicaLostError
from tests.core_fakes import ChainRunner, answer_text, make_core, until
from tests.serve_fakes import CHAT, Client, EngineFleet, ScriptedFleet, client_of, prompt_of, said

COMPLETION: dict[str, Any] = {"model": "chain", "prompt": "once", "max_tokens": 4, "temperature": 0}


async def test_a_chat_is_answered_whole() -> None:
    async with EngineFleet() as fleet:
        reply = await client_of(fleet).post("/v1/chat/completions", {**CHAT, "max_tokens": 5, "temperature": 0})
    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert float(reply.headers["x-ttft-ms"]) >= 0
    expected = answer_text(prompt_of(CHAT["messages"]), 5)
    assert reply.json["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": expected, "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    num_prompt_tokens = len(prompt_of(CHAT["messages"]))
    assert reply.json["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": 5,
        "total_tokens": num_prompt_tokens + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert reply.json["object"] == "chat.completion"
    assert reply.json["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("include_usage", [True, False])
async def test_a_stream_has_role_content_finish_usage_and_done_in_order(include_usage: bool) -> None:
    body = {**CHAT, "max_tokens": 6, "temperature": 0, "stream": True, "n": 2}
    body |= {"stream_options": {"include_usage": True}} if include_usage else {"stream_options": {}}
    async with EngineFleet() as fleet:
        reply = await client_of(fleet).post("/v1/chat/completions", body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, done = reply.events
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    if include_usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 12
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
        assert choices[-1]["delta"] == {}
        text = "".join(c["delta"].get("content", "") for c in choices)
        assert text == answer_text(prompt_of(CHAT["messages"]), 6)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("prompts", "texts"),
    [
        ("once", ["once"]),
        (["once", "far away"], ["once", "far away"]),
        ([104, 105], ["hi"]),
        ([[104], [105]], ["h", "i"]),
    ],
)
async def test_every_shape_of_prompts_is_answered_in_order_n_times_each(
    prompts: Any, texts: list[str], stream: bool
) -> None:
    async with EngineFleet() as fleet:
        body = {**COMPLETION, "prompt": prompts, "n": 2, "echo": True, "stream": stream}
        reply = await client_of(fleet).post("/v1/completions", body)
    expected = [text + answer_text(text.encode(), 4) for text in texts for _ in range(2)]
    assert _completion_texts(reply, stream) == expected


def _completion_texts(reply: Any, stream: bool) -> list[str]:
    objects = reply.events[:-1] if stream else [reply.json]
    texts: dict[int, str] = {}
    for choice in (choice for value in objects for choice in value["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in sorted(texts)]


async def test_usage_counts_a_prompt_once_however_often_it_is_answered() -> None:
    async with EngineFleet() as fleet:
        reply = await client_of(fleet).post("/v1/completions", {**COMPLETION, "prompt": ["abc", "defg"], "n": 3})
    assert reply.json["usage"]["prompt_tokens"] == 7
    assert reply.json["usage"]["completion_tokens"] == 2 * 3 * 4


async def test_models_are_listed_and_found_by_name_and_alias() -> None:
    client = client_of(ScriptedFleet())
    listed = (await client.get("/v1/models")).json
    assert [model["id"] for model in listed["data"]] == ["chain", "org/other"]
    assert (await client.get("/v1/models/org/other")).json["object"] == "model"
    assert (await client.get("/v1/models/gpt-4o-mini")).json["id"] == "chain"
    unknown = await client.get("/v1/models/nobody")
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")


async def test_health_is_200_only_when_a_replica_can_answer() -> None:
    assert (await client_of(ScriptedFleet(ready=(False, True))).get("/health")).status == 200
    for ready in ((), (False,)):
        reply = await client_of(ScriptedFleet(ready=ready)).get("/health")
        assert reply.status == 503
        assert int(reply.headers["retry-after"]) > 0


async def test_status_shows_the_engine_and_null_for_what_is_unknown() -> None:
    async with EngineFleet() as fleet:
        shown = (await client_of(fleet).get("/status")).json
    (replica,) = shown["replicas"]
    assert replica["engine"]["scheduler"]["slots"] == 4
    assert replica["engine"]["scheduler"]["predicted_wait_s"] is None
    assert (await client_of(ScriptedFleet()).get("/status")).json["replicas"][0]["engine"] is None


@pytest.mark.parametrize(
    ("raw", "content_type", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'"text"', "application/json", 400),
        (b"null", "application/json", 400),
        (b'{"model": "chain", "messages": [{"role": "user", "content": "\xff"}]}', "application/json", 400),
        (b'{"model": ' + b"[" * 3000, "application/json", 400),
        (b'{"model": ' + b"1" * 3900 + b"}", "application/json", 400),
        (json.dumps(CHAT).encode(), "text/plain", 400),
        (b"x" * 4097, "application/json", 413),
    ],
)
async def test_bodies_that_are_no_request_are_refused_in_openais_shape(
    raw: bytes, content_type: str, status: int
) -> None:
    fleet = ScriptedFleet(*said("unused"))
    headers = {"content-type": content_type}
    reply = await client_of(fleet).post("/v1/chat/completions", raw, **headers)
    assert reply.status == status
    assert reply.error["type"] == "invalid_request_error"
    assert fleet.calls == []


async def test_a_body_that_lies_about_its_length_is_cut_off() -> None:
    reply = await client_of(ScriptedFleet()).post("/v1/chat/completions", b" " * 5000, **{"content-length": "10"})
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")


async def test_a_declared_length_is_enough_to_refuse() -> None:
    reply = await client_of(ScriptedFleet()).post("/v1/chat/completions", b"", **{"content-length": "99999999999"})
    assert reply.status == 413


@pytest.mark.parametrize(
    ("path", "method", "status", "code"),
    [
        ("/v1/nothing", "GET", 404, "unknown_url"),
        ("/", "GET", 404, "unknown_url"),
        ("/v1/chat/completions/", "POST", 404, "unknown_url"),
        ("/v1/chat/completions", "GET", 405, "method_not_allowed"),
        ("/v1/models", "DELETE", 405, "method_not_allowed"),
    ],
)
async def test_unknown_addresses_and_methods_in_openais_shape(path: str, method: str, status: int, code: str) -> None:
    reply = await client_of(ScriptedFleet()).get(path, method)
    assert (reply.status, reply.error["code"]) == (status, code)


async def test_an_unknown_model_is_a_404_that_names_the_models() -> None:
    reply = await client_of(ScriptedFleet()).post("/v1/chat/completions", {**CHAT, "model": "gpt-9"})
    assert reply.status == 404
    assert "'chain', 'org/other'" in reply.error["message"]
    assert reply.error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (AdmissionRefusedError("requests", 8, 9, 6.4), 429, "7"),
        (ContextLengthError(5000, 4096), 400, None),
        (EngineDeadError("gone"), 503, "5"),
        (StepFailedError("bad row"), 500, None),
        (RuntimeError("secret path /etc"), 500, None),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_token_has_its_own_status(
    error: Exception, status: int, retry_after: str | None, stream: bool
) -> None:
    fleet = ScriptedFleet(error)
    reply = await client_of(fleet).post("/v1/chat/completions", {**CHAT, "stream": stream})
    assert reply.status == status
    assert reply.headers.get("retry-after") == retry_after
    assert "secret" not in reply.error["message"]
    assert fleet.num_open == 0


async def test_an_error_after_the_first_token_is_an_event_and_the_end() -> None:
    fleet = ScriptedFleet(*said("one", "two")[:1], ReplicaLostError("gone"))
    reply = await client_of(fleet).post("/v1/chat/completions", {**CHAT, "stream": True})
    assert reply.status == 200
    *_, last = reply.events
    assert last["error"]["code"] == "replica_lost"
    assert "[DONE]" not in reply.events


async def test_a_whole_answer_that_fails_late_still_gets_its_status() -> None:
    fleet = ScriptedFleet(*said("one", "two")[:1], ReplicaLostError("gone"))
    reply = await client_of(fleet).post("/v1/chat/completions", CHAT)
    assert (reply.status, reply.error["code"]) == (503, "replica_lost")


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_takes_too_long_is_a_408_and_its_call_is_closed(stream: bool) -> None:
    fleet = ScriptedFleet(asyncio.Event())
    client = client_of(fleet, request_timeout_s=0.02)
    reply = await client.post("/v1/chat/completions", {**CHAT, "stream": stream})
    assert (reply.status, reply.error["code"]) == (408, "request_timeout")
    assert fleet.num_open == 0


async def test_time_running_out_within_a_stream_is_an_error_event() -> None:
    fleet = ScriptedFleet(*said("one", "two")[:1], asyncio.Event())
    client = client_of(fleet, request_timeout_s=0.05)
    reply = await client.post("/v1/chat/completions", {**CHAT, "stream": True})
    assert reply.status == 200
    assert reply.events[-1]["error"]["code"] == "request_timeout"


async def test_silence_before_the_first_token_is_filled_with_comments() -> None:
    first = asyncio.Event()
    fleet = ScriptedFleet(first, *said("one"))
    client = client_of(fleet, keep_alive_s=0.01)
    body = json.dumps({**CHAT, "stream": True}).encode()
    headers = {"content-type": "application/json"}
    async with client.connection("POST", "/v1/chat/completions", body, **headers) as (reply, task):
        while reply.body.count(b": keep-alive\n\n") < 2:
            reply.news.clear()
            await reply.news.wait()
        first.set()
        await task
    assert reply.status == 200
    assert reply.events[-1] == "[DONE]"
    assert reply.events[1]["choices"][0]["delta"]["content"] == "one"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_token_ends_the_call(stream: bool) -> None:
    fleet = ScriptedFleet(asyncio.Event())
    async with _posting(client_of(fleet), {**CHAT, "stream": stream}):
        await fleet.opened.wait()
    assert fleet.num_open == 0


async def test_a_client_that_leaves_within_a_stream_ends_the_call() -> None:
    fleet = ScriptedFleet(*said("one", "two")[:1], asyncio.Event())
    async with _posting(client_of(fleet), {**CHAT, "stream": True}) as reply:
        while b"one" not in reply.body:
            reply.news.clear()
            await reply.news.wait()
    assert fleet.num_open == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_cancels_the_response_ends_the_call(stream: bool) -> None:
    fleet = ScriptedFleet(asyncio.Event())
    body = json.dumps({**CHAT, "stream": stream}).encode()
    headers = {"content-type": "application/json"}
    connection = client_of(fleet).connection("POST", "/v1/chat/completions", body, **headers)
    _, task = await connection.__aenter__()
    await fleet.opened.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.__aexit__(None, None, None)
    assert fleet.num_open == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_slot_within_a_step(stream: bool) -> None:
    runner = ChainRunner(step_s=0.002)
    async with EngineFleet(make_core(runner)) as fleet:
        client = client_of(fleet)
        async with _posting(client, {**CHAT, "stream": stream, "max_tokens": 400, "temperature": 0}):
            await until(fleet.engine, lambda: bool(runner.batches))
        assert fleet.runner.num_open == 0
        num_steps = len(runner.batches)
        # Whatever runs now was chosen before the cancellation arrived.
        short = await client.post("/v1/chat/completions", {**CHAT, "max_tokens": 3, "temperature": 0})
        assert short.status == 200
        alone = [batch for batch in runner.batches[num_steps:] if len(batch) == 1]
        assert len(alone) >= 2
        assert fleet.engine.status().scheduler.num_cancelled == 1


def _posting(client: Client, body: dict[str, Any]) -> Any:
    return _Posting(client, body)


class _Posting:
    def __init__(self, client: Client, body: dict[str, Any]) -> None:
        headers = {"content-type": "application/json"}
        self._connection = client.connection("POST", "/v1/chat/completions", json.dumps(body).encode(), **headers)

    async def __aenter__(self) -> Any:
        reply, _ = await self._connection.__aenter__()
        return reply

    async def __aexit__(self, *error: Any) -> None:
        await self._connection.__aexit__(*error)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_requests_name_goes_back_and_into_the_call(stream: bool) -> None:
    fleet = ScriptedFleet(*said("hi"))
    body = {**CHAT, "stream": stream}
    reply = await client_of(fleet).post("/v1/chat/completions", body, **{"x-request-id": "mine-1"})
    assert reply.headers["x-request-id"] == fleet.calls[0].client_request_id == "mine-1"


@pytest.mark.parametrize("given", ["", "two words", "x" * 201, "caf\u00e9"])
async def test_who_names_no_request_gets_a_name(given: str) -> None:
    client = client_of(ScriptedFleet(*said("hi")))
    for body in (CHAT, {}):
        reply = await client.post("/v1/chat/completions", body, **{"x-request-id": given})
        assert reply.headers["x-request-id"].startswith("req_")
