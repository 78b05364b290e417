"""An endpoint whose timing is known, to measure the measurer: `python -m serve_app.bench.reference_server --help`.

Owns: a small HTTP/1.1 server that streams tokens at planned moments, stamps each with the time at which it was written,
and can misbehave on request. Must not know: the client, or any model.

It works one request per slot; further ones wait in arrival order, as in a real engine. A request is told from its body:
`max_tokens` sets the length. Clock: `time.monotonic`, which all processes of one machine share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

MODEL = "reference"


@dataclass(slots=True)
class Behaviour:
    """How the server answers. ``fail_every``: every n-th request gets an HTTP 500; ``break_after``: streams are cut
    after n tokens; ``short_by``: answers end that many tokens early; ``tokens_per_chunk``: tokens in one event."""

    first_token_s: float = 0.05
    token_gap_s: float = 0.02
    slots: int = 64
    fail_every: int = 0
    break_after: int | None = None
    short_by: int = 0
    tokens_per_chunk: int = 1


@dataclass(slots=True)
class ReferenceServer:
    """Serves ``behaviour`` on a loopback port; ``requests`` keeps the bodies in arrival order."""

    behaviour: Behaviour
    requests: list[Mapping[str, Any]] = field(default_factory=list)
    num_waiting: int = 0
    num_running: int = 0
    peak_running: int = 0
    num_connections: int = 0
    url: str = ""
    _slots: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.behaviour.slots)

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[ReferenceServer]:
        """Listen while the context is open; port 0 takes a free one. ``url`` says where."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", port, backlog=512)
        async with server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ", 2)[1]
        lengths = [line.split(":")[1] for line in head.lower().splitlines() if line.startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0])) if lengths else b""
        if not path.endswith("/completions"):
            document = self._document(path)
            _write_json(writer, document, "200 OK" if document is not None else "404 Not Found")
            return True
        self.requests.append(json.loads(body))
        number = len(self.requests)
        if self.behaviour.fail_every and number % self.behaviour.fail_every == 0:
            _write_json(writer, {"error": {"message": "failed as asked"}}, "500 Internal Server Error")
            return True
        self.num_waiting += 1
        async with self._slots:
            self.num_waiting -= 1
            self.num_running += 1
            self.peak_running = max(self.peak_running, self.num_running)
            try:
                return await self._answer(self.requests[number - 1], path.endswith("/chat/completions"), writer)
            finally:
                self.num_running -= 1

    def _document(self, path: str) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        if path == "/status":
            running = {"num_running": self.num_running, "peak_running": self.peak_running}
            return {"slots": self.behaviour.slots, "num_waiting": self.num_waiting, **running}
        return {} if path == "/health" else None

    async def _answer(self, body: Mapping[str, Any], is_chat: bool, writer: asyncio.StreamWriter) -> bool:
        behaviour = self.behaviour
        num_tokens = int(body["max_tokens"]) - behaviour.short_by
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        # Moments are planned from the start, so that a late token does not push all later ones.
        start_s = time.monotonic() + behaviour.first_token_s
        for first in range(0, num_tokens, behaviour.tokens_per_chunk):
            last = min(first + behaviour.tokens_per_chunk, num_tokens)
            if behaviour.break_after is not None and first >= behaviour.break_after:
                return False
            await asyncio.sleep(start_s + (last - 1) * behaviour.token_gap_s - time.monotonic())
            text = " ".join(f"t{number}" for number in range(first, last)) + " "
            choice = {"index": 0, **({"delta": {"content": text}} if is_chat else {"text": text})}
            _write_event(writer, {"choices": [choice], "sent_s": time.monotonic()})
        usage = {"prompt_tokens": _num_words(body), "completion_tokens": num_tokens}
        _write_event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        _write_event(writer, {"choices": [], "usage": usage})
        _write_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _num_words(body: Mapping[str, Any]) -> int:
    texts = [body["prompt"]] if "prompt" in body else [message["content"] for message in body["messages"]]
    return sum(len(text.split()) for text in texts)


def _write_event(writer: asyncio.StreamWriter, event: Mapping[str, Any]) -> None:
    _write_chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _write_json(writer: asyncio.StreamWriter, document: Any, status: str) -> None:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


async def _serve_for_ever(behaviour: Behaviour, port: int) -> None:
    async with ReferenceServer(behaviour).serving(port) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Serve until stopped, and print the address first."""
    parser = argparse.ArgumentParser(description="An endpoint with known timing.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--first-token-ms", type=float, default=50.0)
    parser.add_argument("--token-gap-ms", type=float, default=20.0)
    parser.add_argument("--slots", type=int, default=64)
    options = parser.parse_args()
    behaviour = Behaviour(options.first_token_ms / 1000, options.token_gap_ms / 1000, options.slots)
    asyncio.run(_serve_for_ever(behaviour, options.port))


if __name__ == "__main__":
    main()
