"""Each injected fault at load 8: who is concerned, how soon they hear of it, and what works afterwards."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from engine.core.faults import FaultKind, FaultPlan
from engine.errors import (
    AdmissionRefusedError,
    EngineDeadError,
    RequestCancelledError,
    StartupError,
    StepFailedError,
)
from tests.core_fakes import make_request, until
from tests.faults.harness import TOKENIZER, WATCHDOG_S, Outcome, ask, ask_many, running

NUM_CLIENTS = 8
SLOTS = 4
TOLD_WITHIN_S = 2.0
AT_STEP = 20


def concerned(outcomes: list[Outcome], error: type[Exception], within_s: float = TOLD_WITHIN_S) -> list[Outcome]:
    """The outcomes that failed, after checking that they did so properly and all others are right."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    assert all(outcome.is_right for outcome in outcomes if outcome.error is None)
    assert all(isinstance(outcome.error, error) for outcome in failed), failed
    assert all(outcome.silent_s < within_s for outcome in failed), failed
    return failed


async def works_again(engine: AsyncEngine) -> None:
    outcomes = await ask_many(engine, NUM_CLIENTS, num_tokens=10)
    assert all(outcome.is_right for outcome in outcomes)
    await until(engine, lambda: engine.status().scheduler.num_running == 0)
    stats = engine.status().scheduler
    assert stats.num_waiting == 0
    assert stats.num_blocks_free + stats.num_blocks_cached == stats.num_blocks_total


@pytest.mark.parametrize("kind", [FaultKind.RAISE, FaultKind.RAISE_IN_RESULT, FaultKind.OUT_OF_MEMORY])
async def test_a_poisoned_step(kind: FaultKind) -> None:
    async with running([[FaultPlan(kind, AT_STEP)]]) as engine:
        failed = concerned(await ask_many(engine, NUM_CLIENTS), StepFailedError)
        assert 1 <= len(failed) <= SLOTS
        await works_again(engine)
        assert engine.num_restarts == 0


async def test_a_failing_row() -> None:
    async with running([[FaultPlan(FaultKind.FAIL_ROW, AT_STEP)]]) as engine:
        assert len(concerned(await ask_many(engine, NUM_CLIENTS), StepFailedError)) == 1
        await works_again(engine)
        assert engine.num_restarts == 0


async def test_a_slow_step_harms_nobody() -> None:
    async with running([[FaultPlan(FaultKind.SLOW, AT_STEP, slow_s=0.5 * WATCHDOG_S)]]) as engine:
        assert not concerned(await ask_many(engine, NUM_CLIENTS), Exception)
        assert engine.num_restarts == 0


@pytest.mark.parametrize("kind", [FaultKind.ABORT, FaultKind.KILL])
async def test_a_process_that_dies(kind: FaultKind) -> None:
    async with running([[FaultPlan(kind, AT_STEP)]]) as engine:
        outcomes = await ask_many(engine, NUM_CLIENTS)
        failed = concerned(outcomes, EngineDeadError)
        # Those in the slots had tokens. Those that waited went on in the next life as if nothing had been.
        assert len(failed) == SLOTS
        assert all(outcome.text for outcome in failed)
        assert {FaultKind.ABORT: "SIGABRT", FaultKind.KILL: "SIGKILL"}[kind] in failed[0].error.message
        await works_again(engine)
        status = engine.status()
        assert (status.state, status.num_restarts, status.last_failure) == ("running", 1, failed[0].error.message)


async def test_a_hanging_step() -> None:
    async with running([[FaultPlan(FaultKind.HANG, AT_STEP)]]) as engine:
        outcomes = await ask_many(engine, NUM_CLIENTS)
        failed = concerned(outcomes, EngineDeadError, within_s=WATCHDOG_S + TOLD_WITHIN_S)
        assert len(failed) == SLOTS
        assert "no progress" in failed[0].error.message
        await works_again(engine)
        assert engine.num_restarts == 1


async def test_steps_that_fail_in_a_row() -> None:
    async with running([[FaultPlan(FaultKind.RAISE, AT_STEP, num_steps=1000)]], slots=1) as engine:
        outcomes = await ask_many(engine, NUM_CLIENTS)
        failed = concerned(outcomes, StepFailedError)
        assert len(failed) == 2
        await works_again(engine)
        assert engine.num_restarts == 1


@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.HANG])
async def test_an_engine_that_ends_in_every_life_is_given_up(kind: FaultKind) -> None:
    async with running([[FaultPlan(kind, AT_STEP)]] * 10) as engine:
        while engine.healthy:
            outcomes = await ask_many(engine, NUM_CLIENTS)
            assert all(isinstance(outcome.error, EngineDeadError) for outcome in outcomes)
        late = await ask(engine, make_request("late"))
        assert isinstance(late.error, EngineDeadError)
        assert engine.num_restarts == 2


async def test_a_restart_that_fails_twice_is_given_up() -> None:
    dies, refuses = [FaultPlan(FaultKind.KILL, AT_STEP)], [FaultPlan(FaultKind.REFUSE_START)]
    async with running([dies, refuses, refuses]) as engine:
        outcomes = await ask_many(engine, NUM_CLIENTS)
        assert all(isinstance(outcome.error, EngineDeadError) for outcome in outcomes)
        assert "cannot be built" in outcomes[-1].error.message
        assert not engine.healthy


async def test_a_restart_that_fails_once_is_tried_again() -> None:
    dies, refuses = [FaultPlan(FaultKind.KILL, AT_STEP)], [FaultPlan(FaultKind.REFUSE_START)]
    async with running([dies, refuses]) as engine:
        assert len(concerned(await ask_many(engine, NUM_CLIENTS), EngineDeadError)) == SLOTS
        await works_again(engine)


async def test_a_request_that_kills_the_engine_is_not_tried_for_ever() -> None:
    async with running([[FaultPlan(FaultKind.KILL, 0)]] * 2) as engine:
        outcome = await ask(engine, make_request("poison"))
        assert isinstance(outcome.error, EngineDeadError)
        await works_again(engine)
        assert engine.num_restarts == 2


async def test_a_start_that_is_refused_says_why_and_leaves_nothing() -> None:
    with pytest.raises(StartupError, match="cannot be built"):
        async with running([[FaultPlan(FaultKind.REFUSE_START)]]):
            pass


async def test_a_command_that_is_no_engine() -> None:
    command = ("/bin/sh", "-c", "echo out of luck >&2; exit 3")
    engine = AsyncEngine.in_process(EngineConfig(), TOKENIZER, command=command)
    with pytest.raises(EngineDeadError, match=r"status 3.*out of luck"):
        await engine.start()
    await engine.close()


async def test_a_command_that_does_not_exist() -> None:
    engine = AsyncEngine.in_process(EngineConfig(), TOKENIZER, command=("/no/such/program",))
    with pytest.raises(EngineDeadError, match="cannot be started"):
        await engine.start()
    await engine.close()


async def test_closing_while_the_engine_restarts_leaves_nothing() -> None:
    async with running([[FaultPlan(FaultKind.KILL, 3)]]) as engine:
        asked = asyncio.create_task(ask_many(engine, NUM_CLIENTS))
        await until(engine, lambda: not engine.ready)
        await engine.close()
        outcomes = await asked
        assert all(isinstance(outcome.error, EngineDeadError | RequestCancelledError) for outcome in outcomes)


async def test_requests_during_a_restart_are_kept_up_to_a_bound() -> None:
    async with running([[FaultPlan(FaultKind.KILL, 3)]], max_waiting_requests=6) as engine:
        first = asyncio.create_task(ask(engine, make_request("first", "hello", 50)))
        await until(engine, lambda: not engine.ready)
        assert engine.healthy
        outcomes = await ask_many(engine, 10)
        refused = [outcome for outcome in outcomes if isinstance(outcome.error, AdmissionRefusedError)]
        assert len(refused) == 10 - 6
        assert all(outcome.is_right for outcome in outcomes if outcome not in refused)
        assert isinstance((await first).error, EngineDeadError)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_a_signal_from_outside(number: signal.Signals) -> None:
    async with running() as engine:
        load = asyncio.create_task(ask_many(engine, NUM_CLIENTS, num_tokens=200))
        await until(engine, lambda: engine.status().scheduler.num_output_tokens > 50)
        os.kill(engine.engine_pid, number)
        concerned(await load, Exception)
        await works_again(engine)
        assert engine.num_restarts == 1


async def test_a_stopped_process_counts_as_hung() -> None:
    async with running() as engine:
        load = asyncio.create_task(ask_many(engine, NUM_CLIENTS, num_tokens=200))
        await until(engine, lambda: engine.status().scheduler.num_output_tokens > 50)
        os.kill(engine.engine_pid, signal.SIGSTOP)
        failed = concerned(await load, EngineDeadError, within_s=WATCHDOG_S + TOLD_WITHIN_S)
        assert len(failed) == SLOTS
        await works_again(engine)
