"""The whole way (HTTP, proxy, ingress, replica, engine) over real Ray, with a model whose answers are known."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import subprocess
import sys
import time
from importlib import import_module
from typing import Any

import httpx
import openai
import pytest

from engine.request import SamplingParams
from serve_app.client import Ask, connect
from serve_app.errors import TABLE
from tests.core_fakes import answer_text
from tests.serve_endpoint import Endpoint, eventually, user
from tests.serve_fakes import prompt_of

GREEDY: dict[str, Any] = {"model": "chain", "temperature": 0}


def test_the_official_client_gets_whole_and_streamed_answers(chain: Endpoint) -> None:
    client = chain.client()
    expected = answer_text(prompt_of(user("hello")), 20)
    whole = client.chat.completions.create(messages=user("hello"), max_tokens=20, **GREEDY)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "length"
    chunks = list(
        client.chat.completions.create(
            messages=user("hello"), max_tokens=20, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


def test_tokens_come_as_they_are_made_and_several_in_a_message(chain: Endpoint) -> None:
    body = {**GREEDY, "messages": user("hello"), "max_tokens": 200, "stream": True}
    times_s: list[float] = []
    with httpx.stream("POST", f"{chain.url}/v1/chat/completions", json=body) as response:
        times_s = [time.monotonic() for line in response.iter_lines() if '"content":"' in line]
    assert 2 < len(times_s) < 120
    assert times_s[-1] - times_s[0] > 0.1


def test_refusals_and_errors_keep_their_status_through_ray(chain: Endpoint) -> None:
    client = chain.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=user("x" * 600), **GREEDY)
    assert caught.value.code == "context_length_exceeded"
    assert "512" in caught.value.message
    with pytest.raises(openai.NotFoundError, match="'chain'"):
        client.chat.completions.create(model="gpt-9", messages=user("x"))
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=user("x"), extra_body={"top_k": 300}, stream=True, **GREEDY)
    assert caught.value.param == "top_k"


def test_a_full_queue_is_a_429_with_a_predicted_wait(chain: Endpoint) -> None:
    async def ask_all() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            body = {**GREEDY, "messages": user("hello"), "max_tokens": 100}
            return await asyncio.gather(
                *(client.post(f"{chain.url}/v1/chat/completions", json=body) for _ in range(90))
            )

    replies = asyncio.run(ask_all())
    refused = [reply for reply in replies if reply.status_code != 200]
    assert 0 < len(refused) <= 90 - 8 - 64, "8 run, 64 wait; some may be done before the last ones arrive"
    assert {reply.status_code for reply in refused} == {429}
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert all(reply.json()["error"]["code"] == "queue_full" for reply in refused)
    assert len({reply.json()["choices"][0]["message"]["content"] for reply in replies if reply.status_code == 200}) == 1


def test_a_connection_serves_one_request_after_another(chain: Endpoint) -> None:
    connection = http.client.HTTPConnection(chain.url.removeprefix("http://"), timeout=60)
    body = json.dumps({**GREEDY, "messages": user("hello"), "max_tokens": 3})
    sockets = set()
    for stream in (False, True, False):
        more = json.dumps({**json.loads(body), "stream": stream})
        connection.request("POST", "/v1/chat/completions", more, {"content-type": "application/json"})
        reply = connection.getresponse()
        expected = "text/event-stream" if stream else "application/json"
        assert reply.headers["content-type"].startswith(expected)
        assert reply.read()
        sockets.add(connection.sock)
    assert len(sockets) == 1
    assert None not in sockets


def test_request_ids_go_in_and_out(chain: Endpoint) -> None:
    body = {**GREEDY, "messages": user("hello"), "max_tokens": 1}
    reply = httpx.post(f"{chain.url}/v1/chat/completions", json=body, headers={"X-Request-Id": "mine-1"})
    assert reply.headers.get_list("x-request-id") == ["mine-1"]
    assert httpx.get(f"{chain.url}/v1/models").headers["x-request-id"]


def test_two_requests_with_one_request_id_do_not_meet(chain: Endpoint) -> None:
    async def ask_twice() -> list[str]:
        async with httpx.AsyncClient(timeout=60) as client:
            bodies = [{**GREEDY, "messages": user(text), "max_tokens": 30} for text in ("one", "two")]
            headers = {"X-Request-Id": "same"}
            url = f"{chain.url}/v1/chat/completions"
            replies = await asyncio.gather(*(client.post(url, json=body, headers=headers) for body in bodies))
            return [reply.json()["choices"][0]["message"]["content"] for reply in replies]

    assert asyncio.run(ask_twice()) == [answer_text(prompt_of(user(text)), 30) for text in ("one", "two")]


def test_a_body_over_the_limit_is_a_413_and_the_next_request_is_answered(chain: Endpoint) -> None:
    reply = httpx.post(f"{chain.url}/v1/chat/completions", content=b" " * (9 * 2**20), timeout=60)
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "request_too_large"
    assert chain.client().chat.completions.create(messages=user("x"), max_tokens=1, **GREEDY).choices


@pytest.mark.parametrize("stream", [True, False])
def test_two_hundred_early_disconnects_leave_nothing_running(chain: Endpoint, stream: bool) -> None:
    before = chain.scheduler()
    draw = random.Random(7)

    async def leave_early(client: httpx.AsyncClient, after_s: float) -> None:
        body = {**GREEDY, "messages": user("hello"), "max_tokens": 400, "stream": stream}
        try:
            async with (
                asyncio.timeout(after_s),
                client.stream("POST", f"{chain.url}/v1/chat/completions", json=body) as r,
            ):
                async for _ in r.aiter_bytes():
                    pass
        except TimeoutError:
            return

    async def all_of_them() -> None:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=40), timeout=60) as client:
            for _ in range(10):
                await asyncio.gather(*(leave_early(client, draw.uniform(0, 0.1)) for _ in range(20)))

    asyncio.run(all_of_them())
    eventually(lambda: chain.status()["num_open_calls"] == 0)
    eventually(lambda: chain.scheduler()["num_running"] + chain.scheduler()["num_waiting"] == 0)
    after = chain.scheduler()
    assert after["num_finished"] == before["num_finished"], "an answer that nobody reads ran to its end"
    assert after["num_cancelled"] > before["num_cancelled"], "no request got as far as the engine"
    assert after["num_blocks_free"] + after["num_blocks_cached"] == after["num_blocks_total"]


def test_health_and_the_openapi_document(chain: Endpoint) -> None:
    assert httpx.get(f"{chain.url}/health").json() == {"status": "ok", "ready_replicas": {"chain": 1}}
    paths = httpx.get(f"{chain.url}/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/status"} <= set(paths)


def test_errors_of_the_proxys_neighbours_are_in_openais_shape(chain: Endpoint) -> None:
    for method, path in (("GET", "/"), ("POST", "/v1/nothing"), ("DELETE", "/v1/models")):
        reply = httpx.request(method, f"{chain.url}{path}")
        assert reply.status_code in (404, 405)
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


SHORT = Ask(max_tokens=12, sampling=SamplingParams(temperature=0.0))
LONG = Ask(max_tokens=400, sampling=SamplingParams(temperature=0.0))


def test_python_tools_ask_without_http(chain: Endpoint) -> None:
    metal = connect()
    assert metal.models == ("chain",)
    expected = answer_text(prompt_of(user("hello")), 12)
    answer = metal.generate("hello", SHORT)
    assert (answer.text, answer.finish_reasons, answer.usage.num_output_tokens) == (expected, ("length",), 12)
    with metal.stream(user("hello"), SHORT) as pieces:
        assert "".join(pieces) == expected
    assert metal.generate("hello", SHORT, raw=True).text == answer_text(b"hello", 12)
    assert metal.generate([104, 105], SHORT, raw=True).text == answer_text(b"hi", 12)


def test_python_tools_ask_inside_coroutines(chain: Endpoint) -> None:
    metal = connect()

    async def ask() -> list[str]:
        answers = await asyncio.gather(*(metal.agenerate(text, SHORT) for text in ("a", "b", "c")))
        return [answer.text for answer in answers]

    assert asyncio.run(ask()) == [answer_text(prompt_of(user(text)), 12) for text in ("a", "b", "c")]


@pytest.mark.parametrize("sync", [True, False])
def test_a_python_tool_that_leaves_early_frees_its_slot(chain: Endpoint, sync: bool) -> None:
    metal = connect()
    before = chain.scheduler()["num_cancelled"]

    async def leave() -> None:
        async with metal.stream("hello", LONG) as pieces:
            await anext(aiter(pieces))

    if sync:
        with metal.stream("hello", LONG) as pieces:
            next(iter(pieces))
    else:
        asyncio.run(leave())
    eventually(lambda: chain.scheduler()["num_cancelled"] == before + 1)
    assert chain.scheduler()["num_running"] == 0


@pytest.mark.parametrize("name", [name for name in TABLE if name.startswith(("ray.", "grpc."))])
def test_errors_that_the_table_names_exist(name: str) -> None:
    module, _, kind = name.rpartition(".")
    found = getattr(import_module(module), kind)
    assert f"{found.__module__}.{found.__qualname__}" == name


@pytest.mark.parametrize("module", ["serve_app.ingress.deployment", "serve_app.replica.deployment", "serve_app.app"])
def test_ingress_and_replica_start_without_mlx(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps([name.split('.')[0] for name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert {"mlx", "mlx_lm"}.isdisjoint(json.loads(done.stdout))
