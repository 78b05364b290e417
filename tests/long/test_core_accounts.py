"""How requests end: by a stop string, by their caller, by the engine; and that each is accounted for once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from engine.core.generation import GenerationDelta, RequestAccount
from engine.core.supervisor import EngineState
from engine.errors import EngineDeadError
from engine.request import FinishReason
from tests.core_fakes import ChainRunner, answer_text, make_core, make_request, until
from tests.long.test_core_async_engine import PERMITS_FOR_ALL, collect, running


async def _until_text_is_complete(stream: AsyncIterator[GenerationDelta], num_tokens: int) -> list[GenerationDelta]:
    deltas = [await anext(stream)]
    while deltas[-1].num_output_tokens < num_tokens:
        deltas.append(await anext(stream))
    return deltas


async def test_a_stop_string_ends_the_sequence_within_a_step() -> None:
    gate = threading.Semaphore(5)
    runner = ChainRunner(gate=gate)
    async with running(lambda: make_core(runner)) as engine:
        stop = answer_text(b"hello", 20)[3:5]
        stream = engine.generate(make_request("a", "hello", 400, stop=(stop,)))
        deltas = await _until_text_is_complete(stream, 5)
        assert "".join(delta.text for delta in deltas) == answer_text(b"hello", 20)[:3]
        assert deltas[-1].finish_reason is None, "the engine has not told its times yet"
        gate.release(PERMITS_FOR_ALL)
        (last,) = [delta async for delta in stream]
        assert (last.finish_reason, last.stop_reason, last.num_output_tokens) == (FinishReason.STOP, stop, 5)
        assert len(runner.batches) <= 5 + 2
        timeline = last.timeline
        assert timeline is not None
        assert timeline.slot == 0
        assert sum(timeline.waited_s.values()) == pytest.approx(timeline.prefill_started_s - timeline.received_s)
        await until(engine, lambda: engine.status().scheduler.num_running == 0)
        scheduler = engine.status().scheduler
        assert (scheduler.num_finished, scheduler.num_cancelled) == (1, 0)


async def test_a_text_that_is_complete_is_no_failure_of_an_engine_that_dies_before_it_says_so() -> None:
    gate = threading.Semaphore(5)
    accounts: list[RequestAccount] = []
    async with running(lambda: make_core(ChainRunner(gate=gate))) as engine:
        engine.on_account = accounts.append
        stop = answer_text(b"hello", 20)[3:5]
        stream = engine.generate(make_request("a", "hello", 400, stop=(stop,)))
        await _until_text_is_complete(stream, 5)
        engine._supervisor.state = EngineState.DEAD
        engine.engine_lost(EngineDeadError("gone"), for_good=True)
        (last,) = [delta async for delta in stream]
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, stop)
        assert [answer.finish_reason for answer in accounts[0].answers] == [FinishReason.STOP]
        engine._supervisor.state = EngineState.RUNNING
        gate.release(PERMITS_FOR_ALL)


async def test_every_request_that_was_let_in_is_accounted_for_once() -> None:
    gate = threading.Semaphore(0)
    accounts: dict[str, RequestAccount] = {}

    def keep(account: RequestAccount) -> None:
        assert account.request_id not in accounts, "accounted for twice"
        accounts[account.request_id] = account

    async with running(lambda: make_core(ChainRunner(gate=gate), slots=2)) as engine:
        engine.on_account = keep
        left = engine.generate(make_request("left", "hello", 400))
        first = asyncio.ensure_future(anext(left))
        waiting = asyncio.ensure_future(collect(engine, make_request("n", "again", 3, n=2)))
        gate.release(1)
        await first
        await left.aclose()
        assert "left" not in accounts, "the engine has not told its times yet"
        gate.release(PERMITS_FOR_ALL)
        await waiting
        await until(engine, lambda: "left" in accounts)
    (answer,) = accounts["left"].answers
    assert answer.finish_reason is FinishReason.CANCELLED
    assert answer.timeline.slot == 0
    assert answer.timeline.first_token_s is not None
    assert answer.timeline.finished_s is not None
    both = accounts["n"].answers
    assert [(a.index, a.finish_reason, a.num_output_tokens) for a in both] == [
        (0, FinishReason.LENGTH, 3),
        (1, FinishReason.LENGTH, 3),
    ]
