"""The response that begins only when a replica has said something.

Owns: when the status line goes out, keep-alive comments, the time limit, errors before and after the first byte, and
the end of the call when the client leaves. Must not know: what is in an answer (answers.py), which replica gives it.

A status line sent before the first message could only ever say 200. And a call that is made inside the response and
left through ``async with`` ends with it, however it ends; handing a call's generator to a framework's streaming
response lost up to a third of the early disconnects, and a slot with each.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.errors import ErrorAnswer, RequestTimeoutError, answer_for
from serve_app.ingress import sse
from serve_app.ingress.answers import AnswerShape
from serve_app.ingress.error_bodies import error_body
from serve_app.ingress.fleet import CallStream
from serve_app.ingress.scope import note_in, observation_in
from serve_app.protocol import Deltas, GenerateCall, Timings
from serve_app.routing.decision import Decision

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResponseLimits:
    """``timeout_s``: until the last byte. ``keep_alive_s``: silence after which a stream gets a comment line."""

    timeout_s: float
    keep_alive_s: float


class PrimedResponse(Response, ABC):
    """Base: opens the call, writes its answer, and cancels it when the client leaves."""

    def __init__(
        self,
        call: GenerateCall,
        open_call: Callable[[GenerateCall], CallStream],
        limits: ResponseLimits,
    ) -> None:
        super().__init__()
        self._call = call
        self._open_call = open_call
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, until the answer is complete or the client has left."""
        answering = asyncio.create_task(self._answer(Sender(send, scope["path"]), scope))
        leaving = asyncio.create_task(_client_left(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    @abstractmethod
    async def write(self, messages: AsyncIterator[Deltas], sender: Sender) -> None:
        """Send the answer."""

    async def _answer(self, sender: Sender, scope: Scope) -> None:
        observation = observation_in(scope)
        notes = [note for note in (note_in(scope), observation.note if observation else None) if note]
        call = observation.opening(self._call) if observation else self._call
        stream: CallStream | None = None
        try:
            stream = self._open_call(call)
            async with asyncio.timeout(self._limits.timeout_s), stream as messages:
                sender.more_headers = partial(_routing_headers, messages)
                await self.write(_noting(messages, notes) if notes else messages, sender)
        except Exception as error:
            is_late = isinstance(error, TimeoutError)
            answer = answer_for(RequestTimeoutError(self._limits.timeout_s) if is_late else error)
            if answer.status == 500:
                logger.exception("request %s (the client calls it %r) failed", call.request_id, call.client_request_id)
            if observation:
                observation.failed(answer)
            await sender.fail(answer)
        finally:
            if observation:
                observation.routed(getattr(stream, "decision", None))


class ShapedResponse(PrimedResponse, ABC):
    """Base: an answer in the shape of one endpoint."""

    def __init__(
        self,
        call: GenerateCall,
        open_call: Callable[[GenerateCall], CallStream],
        limits: ResponseLimits,
        shape: AnswerShape,
    ) -> None:
        super().__init__(call, open_call, limits)
        self._shape = shape


class StreamedResponse(ShapedResponse):
    """The answer as server-sent events."""

    async def write(self, messages: AsyncIterator[Deltas], sender: Sender) -> None:
        """Send each message's chunks together, and a comment where nothing came for long."""
        async with aclosing(with_silences(messages, self._limits.keep_alive_s)) as arriving:
            async for message in arriving:
                await sender.stream(sse.KEEP_ALIVE if message is None else self._frames(message))
        await sender.stream(b"" if self._shape.named_events else sse.DONE, last=True)

    def _frames(self, message: Deltas) -> bytes:
        named = self._shape.named_events
        return b"".join(sse.event(chunk, named=named) for chunk in self._shape.chunks(message))


class WholeResponse(ShapedResponse):
    """The answer as one JSON object."""

    async def write(self, messages: AsyncIterator[Deltas], sender: Sender) -> None:
        """Wait for the last message, then send."""
        received = [message async for message in messages]
        body = json.dumps(self._shape.whole(received), ensure_ascii=False).encode("utf-8", "replace")
        await sender.whole(200, body, _timing_headers(received[-1].timings))


async def _noting(
    messages: AsyncIterator[Deltas], notes: Sequence[Callable[[Deltas], None]]
) -> AsyncGenerator[Deltas, None]:
    async for message in messages:
        for note in notes:
            note(message)
        yield message


async def with_silences(items: AsyncIterator[T], silence_s: float) -> AsyncGenerator[T | None, None]:
    """Yield the items, and None each time nothing has come for ``silence_s``."""
    while True:
        arriving = asyncio.ensure_future(anext(items, _END))
        try:
            while not (await asyncio.wait((arriving,), timeout=silence_s))[0]:
                yield None
            item = arriving.result()
        finally:
            if arriving.cancel():
                # The call can be closed only when nobody waits for its next message any more.
                await asyncio.wait((arriving,))
        if isinstance(item, _End):
            return
        yield item


class _End:
    pass


_END = _End()


class Sender:
    """Writes one HTTP response and knows whether it has begun. ``more_headers``: what is known when it begins."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self.started = False
        self.more_headers: Callable[[], Mapping[str, str]] = dict

    async def stream(self, body: bytes, last: bool = False) -> None:
        """Send a piece of a stream of events."""
        if not self.started:
            await self._start(
                200, {"content-type": sse.CONTENT_TYPE, "cache-control": "no-cache", "x-accel-buffering": "no"}
            )
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Send a whole answer in JSON."""
        length = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, {**length, **headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, answer: ErrorAnswer) -> None:
        """End with an error: as the whole answer, or as a stream's last event."""
        body = error_body(answer, self._path)
        if self.started:
            # No [DONE] after it: that marks a complete answer.
            await self.stream(sse.event(body, named="type" in body), last=True)
        else:
            await self.whole(answer.status, json.dumps(body).encode(), answer.headers)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        headers = {**headers, **self.more_headers()}
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _routing_headers(messages: object) -> dict[str, str]:
    """Say which replica answers, and why that one, where a router of ours has chosen it."""
    decision: Decision | None = getattr(messages, "decision", None)
    return {"x-route": f"{decision.reason}; replica={decision.chosen.replica}"} if decision else {}


def _timing_headers(timings: Timings | None) -> dict[str, str]:
    if timings is None:
        return {}
    marks: dict[str, float | None] = {"x-queue-ms": timings.queued_s, "x-ttft-ms": timings.first_token_s}
    return {name: f"{seconds * 1000:.1f}" for name, seconds in marks.items() if seconds is not None}


class ErrorResponse(Response):
    """The whole response for an error that came before any call was made. ``path``: what was asked for."""

    def __init__(self, error: BaseException, path: str, headers: Mapping[str, str] | None = None) -> None:
        self._answer = answer_for(error)
        content: Any = json.dumps(error_body(self._answer, path))
        headers = {**self._answer.headers, **(headers or {})}
        super().__init__(content, self._answer.status, headers, "application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, and say so to who watches."""
        if observation := observation_in(scope):
            observation.failed(self._answer)
        await super().__call__(scope, receive, send)


def error_response(error: BaseException, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the whole response for an error that came before any call was made. ``path``: what was asked for."""
    return ErrorResponse(error, path, headers)
