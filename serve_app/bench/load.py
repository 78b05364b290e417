"""Sends sessions to an endpoint: from so many clients at once, or at random moments of a given rate.

Owns: when each request is sent, and the bound of a load in time. Must not know: what requests hold or answers mean.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from serve_app.bench.client import StreamRecord
from serve_app.bench.prompts import WrittenSession, encode_body
from serve_app.capacity.workload import PlannedCall

LAG_PERIOD_S = 0.01


class Streams(Protocol):
    """What a load needs of a client."""

    def stream(self, body: bytes, record: StreamRecord) -> Awaitable[None]:
        """Post ``body`` and fill ``record``."""
        ...


@dataclass(frozen=True, slots=True)
class EncodedSession:
    """A session whose requests are bytes."""

    index: int
    class_name: str
    calls: tuple[tuple[PlannedCall, bytes], ...]


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One request of a load. ``due_s``: when it should have been sent. ``client``: who sent it in a closed loop."""

    session_index: int
    call_index: int
    class_name: str
    plan: PlannedCall
    client: int | None
    due_s: float
    stream: StreamRecord


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """All requests of one load, in the order in which they were sent.

    ``lags_s``: by how much a 10 ms timer in the client's own event loop came late. A client too busy to keep time
    measures itself and not the endpoint. ``cut_off``: the time limit ended the load; open requests count as failed.
    """

    started_s: float
    ended_s: float
    calls: tuple[CallRecord, ...]
    lags_s: tuple[float, ...]
    cut_off: bool


def encode_sessions(sessions: Sequence[WrittenSession], extra: Mapping[str, Any]) -> tuple[EncodedSession, ...]:
    """Make the bytes of every request; ``extra`` is merged into each body."""
    return tuple(
        EncodedSession(
            session.plan.index,
            session.plan.class_name,
            tuple((call.plan, encode_body(call, extra)) for call in session.calls),
        )
        for session in sessions
    )


async def run_closed(
    client: Streams,
    sessions: Sequence[EncodedSession],
    num_clients: int,
    max_load_s: float,
    on_done: Callable[[], None],
) -> LoadRecord:
    """Let ``num_clients`` clients work through ``sessions``: each takes the next one when its last one ended."""
    load = _Load(client, on_done)
    queue = deque(sessions)

    async def work(number: int) -> None:
        while queue:
            await load.run_session(queue.popleft(), number, time.monotonic())

    return await load.run([work(number) for number in range(num_clients)], max_load_s)


async def run_open(
    client: Streams,
    sessions: Sequence[EncodedSession],
    arrivals_s: Sequence[float],
    max_load_s: float,
    on_done: Callable[[], None],
) -> LoadRecord:
    """Start session i at ``arrivals_s[i]`` whatever the endpoint does: a slow one meets a growing crowd."""
    load = _Load(client, on_done)
    start_s = time.monotonic()

    async def arrive(session: EncodedSession, due_s: float) -> None:
        await asyncio.sleep(due_s - time.monotonic())
        await load.run_session(session, None, due_s)

    pairs = zip(sessions, arrivals_s, strict=True)
    return await load.run([arrive(session, start_s + after_s) for session, after_s in pairs], max_load_s)


@dataclass(slots=True)
class _Load:
    client: Streams
    on_done: Callable[[], None]
    calls: list[CallRecord] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)

    async def run(self, work: Sequence[Coroutine[Any, Any, None]], max_load_s: float) -> LoadRecord:
        """Wait for ``work``, at most ``max_load_s``."""
        started_s = time.monotonic()
        watch = asyncio.create_task(self._watch_lag())
        cut_off = False
        try:
            async with asyncio.timeout(max_load_s), asyncio.TaskGroup() as group:
                for each in work:
                    group.create_task(each)
        except TimeoutError:
            cut_off = True
        finally:
            watch.cancel()
        return LoadRecord(started_s, time.monotonic(), tuple(self.calls), tuple(self.lags_s), cut_off)

    async def run_session(self, session: EncodedSession, client: int | None, due_s: float) -> None:
        """Send a session's calls one after the other. A call that fails ends its session: it has no next turn."""
        for index, (plan, body) in enumerate(session.calls):
            if index:
                due_s = time.monotonic() + plan.think_s
                await asyncio.sleep(plan.think_s)
            record = StreamRecord()
            self.calls.append(CallRecord(session.index, index, session.class_name, plan, client, due_s, record))
            await self.client.stream(body, record)
            self.on_done()
            if record.error is not None:
                return

    async def _watch_lag(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(LAG_PERIOD_S)
            self.lags_s.append(max(0.0, time.monotonic() - before_s - LAG_PERIOD_S))
