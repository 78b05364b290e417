"""Clients that leave, hundreds of them, at any moment: nothing stays taken and nothing dies of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from contextlib import aclosing

from engine.core.async_engine import AsyncEngine
from tests.core_fakes import make_request, until
from tests.faults.harness import ask, running

NUM_DISCONNECTS = 300
NUM_CANCELS = 1000
NUM_TOKENS = 30


async def leave(engine: AsyncEngine, number: int, num_seen: int) -> None:
    """Go away before the first token, in the middle, or with the last one."""
    async with aclosing(engine.generate(make_request(f"r{number}", f"prompt {number}", NUM_TOKENS))) as stream:
        if num_seen == 0:
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
        for _ in range(num_seen):
            await anext(stream)


async def test_disconnects() -> None:
    chance = random.Random(5)
    async with running(max_waiting_requests=NUM_DISCONNECTS) as engine:
        await asyncio.gather(*(leave(engine, i, chance.randint(0, NUM_TOKENS)) for i in range(NUM_DISCONNECTS)))
        await nothing_is_held(engine)
        assert (await ask(engine, make_request("next"))).is_right


async def test_cancels_at_random_steps() -> None:
    chance = random.Random(6)
    async with running(max_waiting_requests=NUM_CANCELS) as engine:
        pid = engine.engine_pid

        async def cancel_soon(number: int) -> None:
            task = asyncio.create_task(ask(engine, make_request(f"r{number}", f"prompt {number}", NUM_TOKENS)))
            await asyncio.sleep(chance.random() * 0.02)
            engine.cancel(f"r{number}")
            await task

        for start in range(0, NUM_CANCELS, 50):
            await asyncio.gather(*(cancel_soon(number) for number in range(start, start + 50)))
        await nothing_is_held(engine)
        assert engine.engine_pid == pid
        assert engine.num_restarts == 0
        assert (await ask(engine, make_request("next"))).is_right


async def nothing_is_held(engine: AsyncEngine) -> None:
    await until(engine, lambda: engine.status().scheduler.num_running == engine.status().scheduler.num_waiting == 0)
    stats = engine.status().scheduler
    assert stats.num_blocks_free + stats.num_blocks_cached == stats.num_blocks_total
