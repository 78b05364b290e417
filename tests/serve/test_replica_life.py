"""Replicas that load slowly, cannot load, or die under way, behind real Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray import serve

from engine.errors import MemoryPlanError
from serve_app.app import run_app
from serve_app.config import APP_NAME, AppConfig, load_app_config
from serve_app.replica.startup_board import create_board
from tests.core_fakes import answer_text
from tests.serve_endpoint import Endpoint, eventually, user
from tests.serve_fakes import prompt_of
from tests.serve_replicas import ChainReplica, GatedReplica, UnfitReplica

ASK: dict[str, Any] = {"model": "chain", "temperature": 0, "max_tokens": 20, "messages": user("hello")}
EXPECTED = answer_text(prompt_of(user("hello")), 20)


def config(port: int, model: str = "demo") -> AppConfig:
    engine = {"model": model, "slots": 8, "max_waiting_requests": 64}
    replica = {"shutdown_grace_s": 1.0, "health_check_period_s": 0.5}
    return load_app_config({"port": port, "models": [{"name": "chain", "engine": engine}], "replica": replica})


@pytest.fixture(autouse=True)
def _no_app_left(ray_port: int) -> Iterator[None]:
    yield
    serve.delete(APP_NAME)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_requests_that_come_while_the_model_loads_wait_for_it(ray_port: int, tmp_path: Path) -> None:
    gate = tmp_path / "loaded"
    url = f"http://127.0.0.1:{ray_port}"
    starting = threading.Thread(target=run_app, args=(config(ray_port, str(gate)), GatedReplica))
    starting.start()
    eventually(lambda: answers(url))
    assert httpx.get(f"{url}/health", timeout=30).status_code == 503

    async def ask_all() -> list[str]:
        async with httpx.AsyncClient(timeout=60) as client:
            asking = [asyncio.ensure_future(client.post(f"{url}/v1/chat/completions", json=ASK)) for _ in range(20)]
            await asyncio.wait(asking, timeout=0.2)
            assert not any(request.done() for request in asking)
            gate.touch()
            return [(await request).json()["choices"][0]["message"]["content"] for request in asking]

    assert asyncio.run(ask_all()) == [EXPECTED] * 20
    starting.join(30)
    assert httpx.get(f"{url}/health").status_code == 200


def test_a_replica_that_cannot_start_says_why_and_what_to_do(ray_port: int) -> None:
    board = create_board()
    with pytest.raises(RuntimeError):
        run_app(config(ray_port), UnfitReplica)
    note = ray.get(board.read.remote())
    assert isinstance(note.error, MemoryPlanError)
    assert note.error.fix == "set `slots: 2`"


def replica_process() -> psutil.Process:
    """The replica's process: a child of this test run's own Ray."""
    (process,) = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.is_running() and child.cmdline()[:1] == ["ray::ServeReplica:metalslots:MetalReplica-chain"]
    ]
    return process


def test_a_stream_whose_replica_dies_ends_with_an_error_and_the_next_request_is_answered(ray_port: int) -> None:
    endpoint = Endpoint(f"http://127.0.0.1:{ray_port}")
    run_app(config(ray_port), ChainReplica)
    body = {**ASK, "max_tokens": 400, "stream": True}
    with httpx.stream("POST", f"{endpoint.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        replica_process().kill()
        events = [line for line in lines if line.startswith("data: ")]
    assert '"code":"replica_lost"' in events[-1]
    assert "data: [DONE]" not in events
    # Nothing has been said yet to this client: it waits for the replica that Serve starts in place of the dead one.
    reply = httpx.post(f"{endpoint.url}/v1/chat/completions", json=ASK, timeout=60)
    assert reply.json()["choices"][0]["message"]["content"] == EXPECTED
