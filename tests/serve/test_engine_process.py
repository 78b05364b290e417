"""The engine's own process behind real Ray: what clients see when it dies, and that nothing survives its owner."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray import serve

from serve_app.app import run_app
from serve_app.config import APP_NAME, load_app_config
from tests.core_fakes import answer_text
from tests.faults.chain_replica import ProcessReplica
from tests.serve_endpoint import Endpoint, eventually, user
from tests.serve_fakes import prompt_of

SLOTS = 4
NUM_CLIENTS = 8
NUM_TOKENS = 150
LONG = 3000


@pytest.fixture
def endpoint(ray_port: int) -> Iterator[Endpoint]:
    """An app whose replica has an engine process; afterwards no engine process is left."""
    engine = {"slots": SLOTS, "max_waiting_requests": 64, "watchdog_s": 2.0}
    replica = {"shutdown_grace_s": 1.0, "health_check_period_s": 0.5}
    settings = {"port": ray_port, "models": [{"name": "chain", "engine": engine}], "replica": replica}
    run_app(load_app_config(settings), ProcessReplica)
    yield Endpoint(f"http://127.0.0.1:{ray_port}")
    serve.delete(APP_NAME)
    eventually(lambda: not processes("tests.faults.chain_process"))


def processes(word: str) -> list[psutil.Process]:
    """Processes of this test run whose command line has ``word``."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if any(word in argument for argument in child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            pass
    return found


def engine_process() -> psutil.Process:
    (process,) = processes("tests.faults.chain_process")
    return process


def body(number: int, max_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    text = f"question {number}"
    return {"model": "chain", "temperature": 0, "max_tokens": max_tokens, "stream": True, "messages": user(text)}


def expected(number: int, max_tokens: int = NUM_TOKENS) -> str:
    return answer_text(prompt_of(user(f"question {number}")), max_tokens)


def ask(
    endpoint: Endpoint, number: int, begun: threading.Semaphore, max_tokens: int = NUM_TOKENS
) -> tuple[str, str | None]:
    """Text and error code of one streamed answer; ``begun`` is released at the first piece of it."""
    text, code = "", None
    url = f"{endpoint.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body(number, max_tokens), timeout=60) as response:
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                code = event["error"]["code"]
            elif event["choices"] and event["choices"][0]["delta"].get("content"):
                if not text:
                    begun.release()
                text += event["choices"][0]["delta"]["content"]
    return text, code


def works(endpoint: Endpoint) -> bool:
    reply = httpx.post(
        f"{endpoint.url}/v1/chat/completions", json={**body(99, max_tokens=5), "stream": False}, timeout=60
    )
    return reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"] == expected(99, 5)


def test_the_engine_dies_under_load(endpoint: Endpoint) -> None:
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = [pool.submit(ask, endpoint, number, begun) for number in range(NUM_CLIENTS)]
        for _ in range(SLOTS):
            begun.acquire(timeout=60)
        engine_process().kill()
        results = [answer.result(60) for answer in answers]
    failed = [code for _, code in results if code is not None]
    assert 1 <= len(failed) <= SLOTS
    assert set(failed) == {failed[0]}
    whole = [(number, text) for number, (text, code) in enumerate(results) if code is None]
    assert all(text == expected(number) for number, text in whole), "who had nothing yet does not notice"
    assert works(endpoint)
    eventually(lambda: endpoint.status()["engine"]["num_restarts"] == 1)
    assert "SIGKILL" in endpoint.status()["engine"]["last_failure"]


@pytest.mark.parametrize("how", ["sigkill", "sigterm", "ray.kill"])
def test_the_replica_ends_under_load(endpoint: Endpoint, how: str) -> None:
    begun = threading.Semaphore(0)
    engine = engine_process()
    (replica,) = processes("ray::ServeReplica:metalslots:MetalReplica-chain")
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = [pool.submit(ask, endpoint, number, begun) for number in range(SLOTS)]
        for _ in range(SLOTS):
            begun.acquire(timeout=60)
        if how == "ray.kill":
            ray.kill(replica_actor())
        else:
            replica.send_signal({"sigkill": signal.SIGKILL, "sigterm": signal.SIGTERM}[how])
        engine.wait(timeout=5)
        assert all(code is not None for _, code in (answer.result(60) for answer in answers))
    eventually(lambda: works(endpoint))


def test_the_proxy_dies_under_load(endpoint: Endpoint) -> None:
    begun = threading.Semaphore(0)
    engine = engine_process()
    (proxy,) = processes("ray::ProxyActor")
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = [pool.submit(ask, endpoint, number, begun, LONG) for number in range(NUM_CLIENTS)]
        for _ in range(SLOTS):
            begun.acquire(timeout=60)
        proxy.kill()
        broken = [answer.exception(60) for answer in answers]
    assert all(isinstance(error, httpx.TransportError) for error in broken), "each connection breaks, none hangs"
    eventually(lambda: is_up(endpoint))
    assert idle_within(endpoint, 5), "nobody reads these answers any more"
    assert works(endpoint)
    assert engine_process().pid == engine.pid, "the engine has nothing to do with it"


def is_up(endpoint: Endpoint) -> bool:
    """Whether Serve has put another proxy in the dead one's place."""
    try:
        return httpx.get(f"{endpoint.url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def idle_within(endpoint: Endpoint, limit_s: float) -> bool:
    """Whether the scheduler has nothing left in time."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        found = endpoint.scheduler()
        if found["num_running"] == found["num_waiting"] == 0:
            return True
        threading.Event().wait(0.05)
    return False


def replica_actor() -> Any:
    """The replica's actor handle, as Ray names it."""
    (named,) = [
        actor
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith("SERVE_REPLICA::metalslots#MetalReplica-chain")
    ]
    return ray.get_actor(named["name"], namespace=named["namespace"])
