"""A call's stream over a stand-in for Serve's handle: always cancelled, moved once, never silently short."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.errors import InvalidParameterError, RequestCancelledError
from serve_app.errors import ReplicaLostError
from serve_app.protocol import Deltas, GenerateCall
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

    def cancel(self) -> None:
        self.cancelled = True

    async def __anext__(self) -> Deltas:
        item = next(self._script, None)
        if item is ...:
            await asyncio.Event().wait()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        found: Deltas = item
        return found

    def __next__(self) -> Deltas:
        item = next(self._script)
        if isinstance(item, BaseException):
            raise item
        found: Deltas = item
        return found


class Handle:
    """Gives out responses with the given scripts, one after another."""

    def __init__(self, *scripts: tuple[Any, ...]) -> None:
        self._scripts = list(scripts)
        self.responses: list[Response] = []

    def options(self, **options: Any) -> Handle:
        assert options == {"method_name": "generate", "stream": True}
        return self

    def remote(self, call: GenerateCall) -> Response:
        assert call == replace(CALL, prefix=call.prefix)
        assert call.prefix.hashes
        self.responses.append(Response(self._scripts.pop(0)))
        return self.responses[-1]


async def collect(handle: Handle, sync: bool) -> list[Deltas]:
    if sync:
        with ReplicaStream(handle, CALL) as messages:
            return list(messages)
    async with ReplicaStream(handle, CALL) as stream:
        return [message async for message in stream]


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
        async with ReplicaStream(handle, CALL) as stream:
            await anext(stream)
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


async def test_a_stream_outside_its_block_says_so() -> None:
    stream = ReplicaStream(Handle(ANSWER), CALL)
    with pytest.raises(RuntimeError, match="with"):
        next(stream)
    with pytest.raises(RuntimeError, match="with"):
        await anext(stream)
