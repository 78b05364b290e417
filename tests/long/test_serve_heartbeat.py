"""A heartbeat is said once in its period, and never twice at a time."""

from __future__ import annotations

import asyncio

from serve_app.ingress.heartbeat import Heartbeat


async def test_it_is_said_once_in_a_period_and_not_while_the_last_is_on_its_way() -> None:
    gate = asyncio.Event()
    said: list[int] = []

    async def say() -> None:
        said.append(len(said))
        await gate.wait()
        if len(said) == 2:
            raise ConnectionError("nobody answers")

    heartbeat = Heartbeat(say, 60.0)
    for now_s in (1.0, 2.0, 59.0, 62.0, 200.0):
        heartbeat.beat(now_s)
        await asyncio.sleep(0)
    assert said == [0], "the first one is still on its way"
    gate.set()
    await asyncio.sleep(0)
    for now_s in (201.0, 202.0, 262.0):
        heartbeat.beat(now_s)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert said == [0, 1, 2], "one that failed is followed by others"
