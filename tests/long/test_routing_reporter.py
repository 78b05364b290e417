"""A replica's side of routing, and what a stream does when its replica does not answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from engine.errors import AdmissionRefusedError, EngineDeadError, RequestCancelledError
from engine.interfaces import EngineStatus
from serve_app.errors import ReplicaDrainingError, ReplicaLostError
from serve_app.protocol import Deltas, GenerateCall, Usage
from serve_app.replica.reporter import Reporter
from serve_app.routing.journal import JOURNAL, Journal
from serve_app.routing.keys import prefix_of
from serve_app.routing.policy import RoutingPolicy, RoutingRequest
from serve_app.routing.report import ReplicaReport, from_stats, tag_of, to_stats
from serve_app.routing.stream import ReplicaStream
from tests.long.test_serve_routing_stream import ANSWER, Handle, Response
from tests.serve_fakes import EngineFleet, said

BLOCK_SIZE = 8


def call(text: str = "hello", request_id: str = "c1", **more: object) -> GenerateCall:
    asked = GenerateCall(request_id, "chain", messages=({"role": "user", "content": text},), **more)  # type: ignore[arg-type]
    return replace(asked, prefix=prefix_of(asked))


@pytest.fixture
async def status() -> EngineStatus:
    async with EngineFleet() as fleet:
        return fleet.engine.status()


def reporter(prefix_cache: str = "shared") -> Reporter:
    return Reporter(block_size=BLOCK_SIZE, prefix_cache=prefix_cache)


def test_calls_are_counted_while_they_are_open_however_they_end(status: EngineStatus) -> None:
    replica = reporter()
    with replica.counted(call()), replica.counted(call()):
        assert replica.report(status, ready=True).open_tags == {tag_of("c1")}
    with pytest.raises(ValueError, match="x"), replica.counted(call()):
        raise ValueError("x")
    report = replica.report(status, ready=True)
    assert report.open_tags == frozenset()
    assert report.sequence == 2
    assert report.slots == status.scheduler.slots
    assert from_stats(to_stats(report)) == report


def test_figures_count_exactly_the_open_calls_though_the_engine_is_in_a_long_step(status: EngineStatus) -> None:
    replica = reporter()
    # What it said before the step: one runs, one waits, 50 tokens are unread.
    scheduler = replace(status.scheduler, num_running=1, num_waiting=1, num_unread_tokens=50)
    status = replace(status, scheduler=scheduler)
    newest = call("x" * 400, "c4", n=2)
    with replica.counted(call(request_id="c1")), replica.counted(call(request_id="c2")):
        report = replica.report(status, ready=True)
        assert (report.num_running, report.num_waiting, report.num_unread_tokens) == (1, 1, 50)
        with replica.counted(call(request_id="c3", count_only=True)), replica.counted(newest):
            report = replica.report(status, ready=True)
            assert (report.num_running, report.num_waiting) == (1, 3)
            assert report.num_unread_tokens == 50 + newest.prefix.num_prompt_tokens
    report = replica.report(status, ready=True)
    assert (report.num_running, report.num_waiting, report.num_unread_tokens) == (0, 0, 50)


def test_a_prompt_is_cached_once_its_answer_has_begun_and_until_the_engine_starts_anew(status: EngineStatus) -> None:
    replica = reporter()
    replica.report(status, ready=True)
    with replica.counted(call()) as record:
        assert not replica.report(status, ready=True).prefixes
        record.note(said("a", "b")[0])
        assert replica.report(status, ready=True).prefixes == set(call().prefix.hashes)
    assert not replica.report(replace(status, num_restarts=1), ready=True).prefixes


@pytest.mark.parametrize(("prefix_cache", "num_seen_by_others"), [("shared", 1), ("per-user", 0), ("off", 0)])
def test_who_shares_a_cached_prompt(status: EngineStatus, prefix_cache: str, num_seen_by_others: int) -> None:
    replica, policy = reporter(prefix_cache), RoutingPolicy()
    replica.report(status, ready=True)
    with replica.counted(call(user="anna")) as record:
        record.note(said("a", "b")[0])
    policy.report("r", "n", replica.report(status, ready=True), 0.0)
    decision = policy.choose(RoutingRequest("q", call().prefix, 0, salt=""), 0.0)
    assert decision is not None
    assert (decision.chosen.num_cached_tokens > 0) == bool(num_seen_by_others)


def test_what_is_said_in_tokens_is_said_in_the_routers_tokens(status: EngineStatus) -> None:
    replica = reporter()
    scheduler = replace(status.scheduler, num_unread_tokens=800, prefill_tokens_per_s=400.0)
    status = replace(status, scheduler=scheduler)
    assert replica.report(status, ready=True).num_unread_tokens == 800
    asked = call("x" * 400)
    for _ in range(200):
        with replica.counted(asked) as record:
            record.note(Deltas((), Usage(num_prompt_tokens=4 * asked.prefix.num_prompt_tokens)))
    report = replica.report(status, ready=True)
    assert report.num_unread_tokens == 200
    assert report.prefill_tokens_per_s == pytest.approx(100.0)


def test_a_draining_replica_takes_nothing_new(status: EngineStatus) -> None:
    replica = reporter()
    with replica.counted(call()):
        replica.draining = True
        report = replica.report(status, ready=True)
    assert report.draining
    with pytest.raises(ReplicaDrainingError), replica.counted(call()):
        pass
    replica.draining = False
    with replica.counted(call()):
        pass


def test_without_an_engine_there_is_nothing_to_be_had() -> None:
    assert reporter().report(None, ready=True) == ReplicaReport(1, slots=0, ready=False)


async def collect(handle: Handle, request_id: str = "c1") -> list[Deltas]:
    asked = GenerateCall(request_id, "m", prompts=("x",))
    async with ReplicaStream(handle, asked) as stream:
        return [message async for message in stream]


@pytest.mark.parametrize("error", [ReplicaDrainingError("draining"), EngineDeadError("dead"), ReplicaLostError("gone")])
async def test_a_call_that_could_not_be_answered_there_is_given_to_another(error: Exception) -> None:
    handle = Handle((error,), ANSWER)
    assert await collect(handle) == list(ANSWER)


@pytest.mark.parametrize(("num_replicas", "num_tries"), [(1, 1), (2, 2)])
async def test_a_refusal_is_taken_elsewhere_only_if_there_is_an_elsewhere(num_replicas: int, num_tries: int) -> None:
    policy = RoutingPolicy()
    for number in range(num_replicas):
        policy.report(f"r{number}", f"n{number}", ReplicaReport(1, slots=4), 0.0)
    decision = policy.choose(RoutingRequest("c1", call().prefix, 0), 0.0)
    assert decision is not None
    JOURNAL.note(decision)
    full = AdmissionRefusedError("num_waiting", 4, 4, retry_after_s=2.0)
    handle = Handle((full,), (full,))
    with pytest.raises(AdmissionRefusedError):
        await collect(handle)
    assert len(handle.responses) == num_tries


class Frozen(Response):
    """Yields its script, then nothing until it is cancelled, as a call to a machine that sleeps."""

    def __init__(self, script: tuple[Any, ...]) -> None:
        super().__init__(script)
        self._gone = asyncio.Event()

    def cancel(self) -> None:
        self._gone.set()

    async def __anext__(self) -> Deltas:
        try:
            return await super().__anext__()
        except StopAsyncIteration:
            await self._gone.wait()
            raise asyncio.CancelledError from None


class FreezingHandle(Handle):
    """Its first response freezes."""

    def remote(self, call: GenerateCall) -> Response:
        if self.responses:
            return super().remote(call)
        self.responses.append(Frozen(self._scripts.pop(0)))
        return self.responses[-1]


async def test_a_call_that_its_router_gave_up_moves_if_nothing_has_come() -> None:
    handle = FreezingHandle((), ANSWER)
    collecting = asyncio.ensure_future(collect(handle))
    await asyncio.sleep(0)
    JOURNAL.note_lost("c1")
    assert await collecting == list(ANSWER)


async def test_a_call_that_its_router_gave_up_after_a_message_is_an_error() -> None:
    handle = FreezingHandle((ANSWER[0],), ANSWER)
    collecting = asyncio.ensure_future(collect(handle))
    for _ in range(3):
        await asyncio.sleep(0)
    JOURNAL.note_lost("c1")
    with pytest.raises(ReplicaLostError, match="silent"):
        await collecting


async def test_a_call_that_ended_by_itself_does_not_move() -> None:
    with pytest.raises(RequestCancelledError):
        await collect(Handle((asyncio.CancelledError(),), ANSWER))


def test_a_journal_gives_up_only_what_is_open_and_says_so_once() -> None:
    journal = Journal()
    cancelled: list[str] = []
    journal.note_lost("unknown")
    assert not journal.take_lost("unknown")
    for number in range(2000):
        journal.watch(str(number), partial(cancelled.append, str(number)))
    journal.unwatch("7")
    for number in range(2000):
        journal.note_lost(str(number))
    assert len(cancelled) == 1999
    assert not journal.take_lost("0"), "what is old is forgotten"
    assert journal.take_lost("1999")
    assert not journal.take_lost("1999")
    assert journal.newest(3) == ()
