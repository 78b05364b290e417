"""The engine as its callers see it, with the loop on a thread and a model that needs no weights."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest

from engine.core.async_engine import AsyncEngine
from engine.core.engine_core import EngineCore
from engine.core.faults import FaultKind, FaultPlan, FaultyRunner
from engine.core.generation import GenerationDelta, GenerationRequest
from engine.errors import (
    AdmissionRefusedError,
    ContextLengthError,
    DeadlineExceededError,
    EngineDeadError,
    InvalidParameterError,
    MemoryPlanError,
    RequestCancelledError,
    RequestFailedError,
    StartupError,
    StepFailedError,
)
from engine.request import FinishReason
from engine.text.detokenizer import IncrementalDetokenizer
from tests.core_fakes import ChainRunner, answer, answer_text, letter_tokenizer, make_core, make_request, until

TOKENIZER = letter_tokenizer()
PERMITS_FOR_ALL = 100_000


@asynccontextmanager
async def running(build: Callable[[], EngineCore], **options: float) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine.in_thread(build, TOKENIZER, teardown_s=5.0, **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def collect(engine: AsyncEngine, request: GenerationRequest) -> list[GenerationDelta]:
    return [delta async for delta in engine.generate(request)]


async def text_of(engine: AsyncEngine, request: GenerationRequest) -> str:
    return "".join([delta.text async for delta in engine.generate(request)])


async def test_many_answers_at_once_are_each_their_own() -> None:
    async with running(lambda: make_core(slots=4)) as engine:
        lengths = {f"r{i}": 5 + 7 * i for i in range(16)}
        texts = await asyncio.gather(
            *(text_of(engine, make_request(name, name * 9, length)) for name, length in lengths.items())
        )
        for (name, length), text in zip(lengths.items(), texts, strict=True):
            assert text == answer_text((name * 9).encode(), length)
        assert engine.status().scheduler.peak_running == 4
        await until(engine, lambda: engine.status().scheduler.num_finished == 16)
        assert engine.status().heartbeat_age_s < 30


async def test_exactly_one_end_with_usage_and_times() -> None:
    async with running(make_core) as engine:
        deltas = await collect(engine, make_request("a", "hello", 6))
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [FinishReason.LENGTH]
        last = deltas[-1]
        assert (last.num_prompt_tokens, last.num_output_tokens) == (5, 6)
        marks = last.timeline
        assert (
            marks.received_s <= marks.admitted_s <= marks.prefill_started_s <= marks.first_token_s <= marks.finished_s
        )


async def test_several_answers_to_one_prompt() -> None:
    async with running(make_core) as engine:
        deltas = await collect(engine, make_request("a", "hello", 6, n=3))
        assert sorted(delta.index for delta in deltas if delta.finish_reason) == [0, 1, 2]
        for index in range(3):
            assert "".join(delta.text for delta in deltas if delta.index == index) == answer_text(b"hello", 6)


@pytest.mark.parametrize("num_seen", [0, 1, 3])
async def test_leaving_early_frees_the_slot_within_a_step(num_seen: int) -> None:
    gate = threading.Semaphore(0)
    runner = ChainRunner(gate=gate)
    async with running(lambda: make_core(runner, slots=1)) as engine:
        stream = engine.generate(make_request("a", "hello", 400))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)  # the request is submitted in the first turn of its task
        if num_seen == 0:
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
        else:
            gate.release(num_seen)
            await first
            for _ in range(num_seen - 1):
                await anext(stream)
        await stream.aclose()
        gate.release(PERMITS_FOR_ALL)
        assert await text_of(engine, make_request("b", "next", 5)) == answer_text(b"next", 5)
        # The step that was running when the caller left, and at most one whose choice was made already.
        assert sum("a" in rows for rows in runner.batches) <= num_seen + 2


async def test_cancel_from_outside_raises_in_the_iterator() -> None:
    gate = threading.Semaphore(1)
    async with running(lambda: make_core(ChainRunner(gate=gate))) as engine:
        async with aclosing(engine.generate(make_request("a", "hello", 400))) as stream:
            await anext(stream)
            assert engine.cancel("a")
            assert not engine.cancel("a")
            with pytest.raises(RequestCancelledError):
                await anext(stream)
        gate.release(PERMITS_FOR_ALL)
        await until(engine, lambda: engine.status().scheduler.num_running == 0)


async def test_refusals_come_before_any_delta() -> None:
    gate = threading.Semaphore(0)
    async with running(lambda: make_core(ChainRunner(gate=gate), slots=1, max_waiting_requests=2)) as engine:
        with pytest.raises(InvalidParameterError, match="top_k"):
            await anext(engine.generate(make_request("a", top_k=9999)))
        with pytest.raises(ContextLengthError):
            await anext(engine.generate(make_request("a", "x" * 600)))
        streams = [engine.generate(make_request(f"r{i}", "hello", 3)) for i in range(8)]
        firsts = [asyncio.ensure_future(anext(stream)) for stream in streams]
        # Submitted in one breath while the loop is between steps or held in one: at least the queue's bound is kept.
        await until(engine, lambda: any(first.done() for first in firsts))
        with pytest.raises(InvalidParameterError, match="open already"):
            await anext(engine.generate(make_request("r0")))
        gate.release(PERMITS_FOR_ALL)
        results = await asyncio.gather(*firsts, return_exceptions=True)
        refused = [result for result in results if isinstance(result, AdmissionRefusedError)]
        assert len(refused) >= 8 - 1 - 2
        assert all(error.limit in (2, 3) for error in refused), "two may wait, and one more while the slot is free"
        for stream in streams:
            await stream.aclose()


async def test_a_refused_answer_takes_its_siblings_along() -> None:
    async with running(lambda: make_core(slots=1, max_waiting_requests=2)) as engine:
        with pytest.raises(AdmissionRefusedError):
            await collect(engine, make_request("a", "hello", 300, n=5))
        await until(engine, lambda: engine.status().scheduler.num_running == engine.status().scheduler.num_waiting == 0)
        assert await text_of(engine, make_request("b", "hello", 4)) == answer_text(b"hello", 4)


async def test_an_overdue_request_ends_although_the_engine_is_full() -> None:
    gate = threading.Semaphore(PERMITS_FOR_ALL)
    async with running(lambda: make_core(ChainRunner(gate=gate))) as engine:
        request = make_request("a", "hello", 400)
        with pytest.raises(DeadlineExceededError):
            await collect(engine, make_request("b", "hello", 400, deadline_s=request.received_s))


async def test_a_deadline_holds_although_the_engine_hangs() -> None:
    gate = threading.Semaphore(1)
    async with running(lambda: make_core(ChainRunner(gate=gate))) as engine:
        deadline_s = time.monotonic() + 0.2
        with pytest.raises(DeadlineExceededError):
            await collect(engine, make_request("a", "hello", 400, deadline_s=deadline_s))
        gate.release(PERMITS_FOR_ALL)


async def test_a_text_that_cannot_be_made_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    add = IncrementalDetokenizer.add

    def breaking(self: IncrementalDetokenizer, token_ids: Sequence[int]) -> str:
        if getattr(self, "num_added", 0) == 3 and self is victims[0]:
            raise ZeroDivisionError
        self.num_added = getattr(self, "num_added", 0) + 1
        victims.append(self)
        return add(self, token_ids)

    victims: list[IncrementalDetokenizer] = []
    monkeypatch.setattr(IncrementalDetokenizer, "add", breaking)
    async with running(make_core) as engine:
        tasks = [asyncio.create_task(text_of(engine, make_request(f"r{i}", "hello", 20))) for i in range(4)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        (failed,) = [result for result in results if isinstance(result, Exception)]
        assert isinstance(failed, RequestFailedError)
        assert [result for result in results if result is not failed] == [answer_text(b"hello", 20)] * 3
        await until(engine, lambda: engine.status().scheduler.num_running == 0)
        # The engine may have finished the sequence before the front failed over its third token.
        stats = engine.status().scheduler
        assert (stats.num_finished + stats.num_cancelled, stats.num_failed) == (4, 0)


async def test_a_failed_step_is_an_error_for_its_requests_and_the_engine_goes_on() -> None:
    faults = [FaultPlan(FaultKind.RAISE, at_step=2)]
    async with running(lambda: make_core(FaultyRunner(ChainRunner(), faults))) as engine:
        with pytest.raises(StepFailedError):
            await collect(engine, make_request("a", "hello", 50))
        assert engine.ready
        assert await text_of(engine, make_request("b", "hello", 5)) == answer_text(b"hello", 5)


async def test_a_dead_loop_is_started_again_and_who_had_no_token_does_not_notice() -> None:
    gate = threading.Semaphore(0)
    lives: list[ChainRunner] = []

    def build() -> EngineCore:
        runner = ChainRunner(gate=gate)
        lives.append(runner)
        faults = [FaultPlan(FaultKind.RAISE, at_step=step) for step in (2, 3, 4)] if len(lives) == 1 else []
        return make_core(FaultyRunner(runner, faults), slots=1)

    async with running(build) as engine:
        # One slot: the first to run gets two tokens, two more are in the way of the next failing steps.
        tasks = [asyncio.create_task(collect(engine, make_request(f"r{i}", "hello", 6))) for i in range(6)]
        gate.release(PERMITS_FOR_ALL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [result for result in results if isinstance(result, StepFailedError)]
        survived = [result for result in results if isinstance(result, list)]
        assert (len(failed), len(survived)) == (2, 4)
        for deltas in survived:
            assert sum((delta.token_ids for delta in deltas), ()) == answer(b"hello", 6)
        assert len(lives) == 2
        assert lives[0].closed_on is not None
        assert engine.healthy


async def test_an_engine_that_dies_every_time_is_given_up() -> None:
    faults = [FaultPlan(FaultKind.RAISE, at_step=0, num_steps=100)]
    lives: list[EngineCore] = []

    def build() -> EngineCore:
        lives.append(make_core(FaultyRunner(ChainRunner(), faults), slots=1))
        return lives[-1]

    async with running(build) as engine:
        for number in range(20):
            if not engine.healthy:
                break
            with pytest.raises((StepFailedError, EngineDeadError)):
                await collect(engine, make_request(f"r{number}"))
        assert not engine.healthy
        assert len(lives) == 3
        with pytest.raises(EngineDeadError, match="3 steps in a row"):
            await collect(engine, make_request("late"))


async def test_a_hung_step_is_noticed_and_a_thread_that_hangs_is_not_replaced() -> None:
    gate = threading.Semaphore(1)
    engine = AsyncEngine.in_thread(lambda: make_core(ChainRunner(gate=gate)), TOKENIZER, watchdog_s=0.3, teardown_s=0.1)
    await engine.start()
    with pytest.raises(EngineDeadError, match="no progress"):
        await collect(engine, make_request("a", "hello", 50))
    await until(engine, lambda: not engine.healthy)
    gate.release(PERMITS_FOR_ALL)
    await engine.close()


async def test_an_idle_engine_is_not_taken_for_a_hung_one() -> None:
    async with running(make_core, watchdog_s=0.2) as engine:
        await asyncio.sleep(0.5)
        assert engine.ready
        assert await text_of(engine, make_request("a", "hello", 5)) == answer_text(b"hello", 5)


async def test_startup_errors_arrive_as_themselves() -> None:
    def build() -> EngineCore:
        raise MemoryPlanError("weights 3 > budget 2", "a smaller model")

    engine = AsyncEngine.in_thread(build, TOKENIZER)
    with pytest.raises(MemoryPlanError) as caught:
        await engine.start()
    assert caught.value.fix == "a smaller model"
    assert not engine.healthy
    await engine.close()


async def test_an_unexpected_failure_to_build_is_a_startup_error() -> None:
    engine = AsyncEngine.in_thread(lambda: 1 // 0, TOKENIZER)
    with pytest.raises(StartupError, match="ZeroDivisionError"):
        await engine.start()
    await engine.close()


async def test_requests_during_start_wait_for_it() -> None:
    may_build = threading.Event()

    def build() -> EngineCore:
        may_build.wait()
        return make_core()

    engine = AsyncEngine.in_thread(build, TOKENIZER)
    starting = asyncio.create_task(engine.start())
    tasks = [asyncio.create_task(text_of(engine, make_request(f"r{i}", "hello", 5))) for i in range(20)]
    await asyncio.sleep(0)
    may_build.set()
    await starting
    assert await asyncio.gather(*tasks) == [answer_text(b"hello", 5)] * 20
    await engine.close()


async def test_close_with_grace_lets_answers_end() -> None:
    gate = threading.Semaphore(1)
    runner = ChainRunner(gate=gate)
    engine = AsyncEngine.in_thread(lambda: make_core(runner), TOKENIZER)
    await engine.start()
    stream = engine.generate(make_request("a", "hello", 10))
    text = (await anext(stream)).text
    closing = asyncio.create_task(engine.close(grace_s=30.0))
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="stopping"):
        await collect(engine, make_request("b"))
    gate.release(PERMITS_FOR_ALL)
    async for delta in stream:
        text += delta.text
    await closing
    assert text == answer_text(b"hello", 10)
    assert runner.closed_on is not None


async def test_close_without_grace_fails_what_runs() -> None:
    gate = threading.Semaphore(1)
    engine = AsyncEngine.in_thread(lambda: make_core(ChainRunner(gate=gate)), TOKENIZER)
    await engine.start()
    stream = engine.generate(make_request("a", "hello", 400))
    await anext(stream)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    gate.release(PERMITS_FOR_ALL)
    await closing
    with pytest.raises(RequestCancelledError):
        async for _ in stream:
            pass
