"""Stand-ins for Ray Serve: fleets without a cluster, and a client that speaks ASGI to the application."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp, Message

from engine.batch import BatchRow, StepBatch
from engine.core.async_engine import AsyncEngine
from engine.core.engine_core import EngineCore
from engine.interfaces import PendingStep
from engine.text.parts import TokenizerParts
from engine.text.tokenizer import Tokenizer
from serve_app.autoscaling.journal import ScalingHistory
from serve_app.ingress.fleet import IngressFamilies, ServedModel
from serve_app.ingress.http_app import HttpSettings, build_http_app
from serve_app.ingress.observing import IngressView
from serve_app.protocol import ChoiceDelta, Deltas, GenerateCall, ReplicaStatus, Usage
from serve_app.replica.calls import CallRunner
from serve_app.telemetry.logs import LogConfig
from serve_app.telemetry.observer import ReplicaFamilies, ReplicaObserver, ReplicaView
from serve_app.telemetry.record import ReplicaName
from serve_app.telemetry.tracing import Tracing
from tests.core_fakes import EOS, FACTS, ChainRunner, letter_tokenizer, make_core

MODELS = (ServedModel("chain", 1_700_000_000, ("gpt-4o-mini",)), ServedModel("org/other", 1_700_000_000))
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
SETTINGS = HttpSettings(max_body_bytes=4096, request_timeout_s=30.0, keep_alive_s=30.0)
CHAT: dict[str, Any] = {"model": "chain", "messages": [{"role": "user", "content": "hello"}]}


def chat_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    """The letter tokenizer with a chat template."""
    plain = letter_tokenizer()
    return Tokenizer(TokenizerParts(plain._backend, (EOS,), {"default": template}))


def prompt_of(messages: Sequence[dict[str, str]]) -> list[int]:
    """The tokens that the template makes of ``messages``."""
    return list(("".join(f"{m['role']}:{m['content']}\n" for m in messages) + ">").encode())


class UnobservedFleet:
    """What fleets answer that have nothing to show but their statuses."""

    async def statuses(self) -> Sequence[ReplicaStatus]:
        return []

    async def views(self) -> Sequence[ReplicaView]:
        return [ReplicaView(status) for status in await self.statuses()]

    async def families(self) -> Sequence[ReplicaFamilies]:
        return []

    async def ingress_families(self) -> Sequence[IngressFamilies]:
        return []

    async def ingress_views(self) -> Sequence[IngressView]:
        return []

    async def scaling(self) -> Mapping[str, ScalingHistory]:
        return {}


class ScriptedFleet(UnobservedFleet):
    """Answers every call with the same items: messages are yielded, errors raised, events awaited."""

    models = MODELS

    def __init__(self, *script: Deltas | Exception | asyncio.Event, ready: Sequence[bool] = (True,)) -> None:
        self._script = script
        self._ready = ready
        self.calls: list[GenerateCall] = []
        self.num_open = 0
        self.opened = asyncio.Event()
        self.left = asyncio.Event()

    def open(self, call: GenerateCall) -> AbstractAsyncContextManager[AsyncIterator[Deltas]]:
        return self._open(call)

    async def statuses(self) -> Sequence[ReplicaStatus]:
        return [ReplicaStatus(f"r{i}", "node", "mac", "chain", ready, 0) for i, ready in enumerate(self._ready)]

    @asynccontextmanager
    async def _open(self, call: GenerateCall) -> AsyncIterator[AsyncIterator[Deltas]]:
        self.calls.append(call)
        self.num_open += 1
        self.opened.set()
        try:
            async with aclosing(self._run()) as messages:
                yield messages
        finally:
            self.num_open -= 1
            self.left.set()

    async def _run(self) -> AsyncGenerator[Deltas, None]:
        for item in self._script:
            if isinstance(item, asyncio.Event):
                await item.wait()
            elif isinstance(item, Exception):
                raise item
            else:
                yield item


class EngineFleet(UnobservedFleet):
    """One engine of the chain model in a thread of this process: everything but Ray and MLX."""

    models = MODELS

    def __init__(
        self,
        core: EngineCore | None = None,
        flush_interval_s: float = 0.0,
        template: str = TEMPLATE,
        tracing: Tracing | None = None,
        max_messages_per_s: float = math.inf,
    ) -> None:
        tokenizer = chat_tokenizer(template)
        self.engine = AsyncEngine.in_thread(lambda: core or make_core(), tokenizer)
        self.observer = ReplicaObserver(ReplicaName("r0", "node", "mac"), LogConfig(), 512, tracing)
        self.runner = CallRunner(
            self.engine,
            tokenizer,
            flush_interval_s=flush_interval_s,
            max_waiting_requests=64,
            max_messages_per_s=max_messages_per_s,
            recorder=self.observer.recorder(self.engine.holds),
        )

    async def __aenter__(self) -> EngineFleet:
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()
        self.runner.close()

    def open(self, call: GenerateCall) -> AbstractAsyncContextManager[AsyncIterator[Deltas]]:
        return aclosing(self.runner.generate(call))

    async def statuses(self) -> Sequence[ReplicaStatus]:
        return [
            ReplicaStatus("r0", "node", "mac", "chain", self.engine.ready, self.runner.num_open, self.engine.status())
        ]

    async def views(self) -> Sequence[ReplicaView]:
        return [self.observer.view(status) for status in await self.statuses()]

    async def families(self) -> Sequence[ReplicaFamilies]:
        return [self.observer.families(status) for status in await self.statuses()]


class SpeakingRunner(ChainRunner):
    """Says the same text to everybody, and remembers the last prompt. It takes no notice of grammars."""

    def __init__(self, text: str) -> None:
        super().__init__(facts=replace(FACTS, guides=True, max_model_len=4096))
        self._text = text.encode()
        self.prompt = ""
        self.rows: list[BatchRow] = []

    def launch(self, batch: StepBatch) -> PendingStep:
        self.rows += batch.rows
        self.prompt = bytes(batch.rows[-1].token_ids[: batch.rows[-1].num_prompt_tokens]).decode()
        return super().launch(batch)

    def _sample(self, row: BatchRow) -> int:
        return self._text[row.output_index] if row.output_index < len(self._text) else EOS


class Reply:
    """What an application sent for one request."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.news = asyncio.Event()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, after checking that it is one."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        found: dict[str, Any] = error
        return found

    @property
    def events(self) -> list[Any]:
        """The values of a stream's events; "[DONE]" stays as it is, and comments are left out."""
        lines = [line for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


class Client:
    """One request to an ASGI application, with a connection that can be closed at any moment."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        """Send ``body`` (bytes as they are, anything else as JSON) and wait for the whole reply."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.connection("POST", path, raw, **{"content-type": "application/json", **headers}) as (
            reply,
            task,
        ):
            await task
        return reply

    async def get(self, path: str, method: str = "GET", **headers: str) -> Reply:
        """Send a request without a body and wait for the whole reply."""
        async with self.connection(method, path, b"", **headers) as (reply, task):
            await task
        return reply

    @asynccontextmanager
    async def connection(
        self, method: str, path: str, body: bytes, **headers: str
    ) -> AsyncIterator[tuple[Reply, asyncio.Task[None]]]:
        """Send a request; leaving the block closes the connection and waits for the application to notice."""
        reply, gone, parts = Reply(), asyncio.Event(), [body]

        async def receive() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                reply.body += message["body"]
            reply.news.set()

        raw_headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "headers": raw_headers,
        }
        task = asyncio.ensure_future(self._app(scope, receive, send))
        try:
            yield reply, task
        finally:
            gone.set()
            await task


def client_of(fleet: Any, **settings: Any) -> Client:
    """A client of the application over ``fleet``."""
    book, watch = settings.pop("book", None), settings.pop("watch", None)
    return Client(build_http_app(fleet, replace(SETTINGS, **settings), book, watch))


def said(*texts: str, finish_reason: str = "stop") -> tuple[Deltas, ...]:
    """The messages of an answer with one choice."""
    deltas = [Deltas((ChoiceDelta(0, text, (1,)),)) for text in texts[:-1]]
    last = ChoiceDelta(0, texts[-1], (1,), finish_reason=finish_reason)
    return (*deltas, Deltas((last,), Usage(3, len(texts), 1)))
