"""A call's stream over a stand-in for Serve's handle: always cancelled, moved once, never silently short."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import DeadlineExceededError, InvalidParameterError, RequestCancelledError
from serve_app.errors import ReplicaLostError
from serve_app.protocol import Deltas, GenerateCall
from serve_app.routing import stream
from serve_app.routing.stream import ReplicaStream
from tests.serve_fakes import said

CALL = GenerateCall("c1", "m", prompts=("x",))
ANSWER = said("one", "two", "three")
LOST = ReplicaLostError("gone")


class Response:
    """One response of a handle: yields, raises, or waits for ever at an ``...``."""

    def __init__(self, script: tuple[Any, ...]) -> None:
        self._script: Iterator[Any] = iter(script)
        self.cancelled = False
        self._is_cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled = True
        self._is_cancelled.set()

    async def __anext__(self) -> Deltas:
        item = next(self._script, None)
        if item is ...:
            await asyncio.to_thread(self._is_cancelled.wait, 10)
            raise asyncio.CancelledError
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        found: Deltas = item
        return found

    def __next__(self) -> Deltas:
        item = next(self._script)
        if item is ...:
            self._is_cancelled.wait(10)
            raise RequestCancelledError("cancelled")
        if isinstance(item, BaseException):
            raise item
        found: Deltas = item
        return found


class Handle:
    """Gives out responses with the given scripts, one after another."""

    def __init__(self, *scripts: tuple[Any, ...]) -> None:
        self._scripts = list(scripts)
        self.responses: list[Response] = []
        self.timeouts_s: list[float | None] = []

    def options(self, **options: Any) -> Handle:
        assert options == {"method_name": "generate", "stream": True}
        return self

    def remote(self, call: GenerateCall) -> Response:
        assert call == replace(CALL, prefix=call.prefix, timeout_s=call.timeout_s)
        self.timeouts_s.append(call.timeout_s)
        assert call.prefix.hashes
        self.responses.append(Response(self._scripts.pop(0)))
        return self.responses[-1]


async def collect(handle: Handle, sync: bool, timeout_s: float | None = None) -> list[Deltas]:
    if sync:
        return await asyncio.to_thread(collect_sync, handle, timeout_s)
    async with ReplicaStream(handle, replace(CALL, timeout_s=timeout_s)) as messages:
        return [message async for message in messages]


def collect_sync(handle: Handle, timeout_s: float | None = None) -> list[Deltas]:
    with ReplicaStream(handle, replace(CALL, timeout_s=timeout_s)) as messages:
        return list(messages)


@pytest.mark.parametrize("sync", [True, False])
async def test_a_complete_answer_ends_by_itself(sync: bool) -> None:
    handle = Handle(ANSWER)
    assert await collect(handle, sync) == list(ANSWER)
    assert [response.cancelled for response in handle.responses] == [False]


@pytest.mark.parametrize("sync", [True, False])
async def test_leaving_early_cancels(sync: bool) -> None:
    handle = Handle(ANSWER)
    if sync:
        with ReplicaStream(handle, CALL) as messages:
            next(messages)
    else:
        async with ReplicaStream(handle, CALL) as messages:
            await anext(messages)
    assert handle.responses[0].cancelled


async def test_being_cancelled_while_waiting_cancels_the_call() -> None:
    handle = Handle((...,))
    task = asyncio.ensure_future(collect(handle, sync=False))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert handle.responses[0].cancelled


@pytest.mark.parametrize("sync", [True, False])
async def test_a_replica_lost_before_the_first_message_is_replaced_once(sync: bool) -> None:
    handle = Handle((LOST,), ANSWER)
    assert await collect(handle, sync) == list(ANSWER)
    assert handle.responses[0].cancelled
    twice = Handle((LOST,), (LOST,), ANSWER)
    with pytest.raises(ReplicaLostError):
        await collect(twice, sync)
    assert len(twice.responses) == 2


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("script", [(*ANSWER[:1], LOST), (InvalidParameterError("bad", "n"),)])
async def test_after_the_first_message_and_for_wrong_requests_nothing_is_repeated(
    script: tuple[Any, ...], sync: bool
) -> None:
    handle = Handle(script, ANSWER)
    with pytest.raises((ReplicaLostError, InvalidParameterError)):
        await collect(handle, sync)
    assert len(handle.responses) == 1
    assert handle.responses[0].cancelled


@pytest.mark.parametrize("sync", [True, False])
async def test_an_answer_that_merely_stops_is_an_error(sync: bool) -> None:
    with pytest.raises(ReplicaLostError):
        await collect(Handle(ANSWER[:2]), sync)


async def test_a_replica_that_cancels_by_itself_does_not_cancel_its_caller() -> None:
    with pytest.raises(RequestCancelledError):
        await collect(Handle((ANSWER[0], asyncio.CancelledError())), sync=False)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("script", [(...,), (ANSWER[0], ...)])
async def test_a_call_ends_at_its_deadline_though_nobody_answers(
    script: tuple[Any, ...], sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "OVERDUE_SLACK_S", 0.0)
    handle = Handle(script)
    with pytest.raises(DeadlineExceededError):
        await collect(handle, sync, timeout_s=0.01)
    assert handle.responses[0].cancelled


async def test_a_call_that_moves_has_the_time_that_is_left() -> None:
    handle = Handle((LOST,), ANSWER)
    assert await collect(handle, sync=False, timeout_s=60.0) == list(ANSWER)
    first_s, second_s = handle.timeouts_s
    assert first_s is not None
    assert second_s is not None
    assert 0 < second_s < first_s <= 60.0


async def test_a_stream_outside_its_block_says_so() -> None:
    messages = ReplicaStream(Handle(ANSWER), CALL)
    with pytest.raises(RuntimeError, match="with"):
        next(messages)
    with pytest.raises(RuntimeError, match="with"):
        await anext(messages)
