"""Clients that read slowly, or not at all: they keep nobody waiting, and hold no slot once their answer is made."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message

from tests.core_fakes import until
from tests.serve_fakes import CHAT, EngineFleet, client_of

LONG = {**CHAT, "stream": True, "max_tokens": 300, "temperature": 0, "seed": 1}


class StuckReader:
    """Asks, reads the beginning of the answer, and then no more until ``goes_on`` is set."""

    def __init__(self, app: ASGIApp) -> None:
        self.goes_on = asyncio.Event()
        self.stuck = asyncio.Event()
        self.received = b""
        self.task = asyncio.create_task(self._ask(app))

    async def _ask(self, app: ASGIApp) -> None:
        parts = [json.dumps(LONG).encode()]

        async def receive() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            self.received += message.get("body", b"")
            if self.received:
                self.stuck.set()
                await self.goes_on.wait()

        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "headers": [(b"content-type", b"application/json")],
        }
        await app(scope, receive, send)


async def test_who_does_not_read_keeps_nobody_waiting() -> None:
    async with EngineFleet() as fleet:
        client = client_of(fleet)
        readers = [StuckReader(client._app) for _ in range(6)]
        await asyncio.gather(*(reader.stuck.wait() for reader in readers))
        # More of them than there are slots, and yet their slots come free, and others are answered.
        reply = await client.post("/v1/chat/completions", {**LONG, "max_tokens": 5})
        assert reply.events[-1] == "[DONE]"
        await until(fleet.engine, lambda: fleet.engine.status().scheduler.num_running == 0)
        assert all(not reader.task.done() for reader in readers)
        for reader in readers:
            reader.goes_on.set()
        await asyncio.gather(*(reader.task for reader in readers))
        # What they had left unread was kept for them, every word of it.
        texts = {_text(reader.received) for reader in readers}
        assert len(texts) == 1
        assert len(texts.pop()) == 300


def _text(body: bytes) -> str:
    lines = [line for line in body.decode().split("\n\n") if line.startswith("data: {")]
    choices = [json.loads(line[6:])["choices"][0] for line in lines]
    return "".join(choice["delta"].get("content", "") for choice in choices)
