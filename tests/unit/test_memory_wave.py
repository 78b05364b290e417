"""The memory guard on the real scheduler and step loop: pressure comes and goes, answers stay right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.batch import StepBatch
from engine.core.engine_core import EngineCore
from engine.memory.guard import GuardConfig, MemoryGuard, MemoryReading, Pressure
from engine.memory.guard_driver import GuardDriver
from engine.memory.plan_inputs import GIB
from engine.request import EngineRequest, TokenOutput
from engine.scheduler import Scheduler
from tests.builders import make_config, make_request
from tests.fakes import FakeClock, FakeRunner, expected_answer

HEADROOM = 4 * GIB
NUM_BLOCKS = 128


def half_a_second(batch: StepBatch) -> float:
    return 0.5


class Office:
    """One engine on a virtual clock, and another program that takes a part of the headroom."""

    def __init__(self, taken_part_at: Callable[[float], float], slots: int = 6, num_blocks: int = NUM_BLOCKS) -> None:
        self.clock = FakeClock()
        self.guard = MemoryGuard(GuardConfig(HEADROOM, limit_bytes=16 * GIB))
        self.scheduler = Scheduler(make_config(slots=slots, num_blocks=num_blocks))
        self._taken_part_at = taken_part_at
        runner = FakeRunner(self.clock, num_blocks=num_blocks, step_time=half_a_second)
        driver = GuardDriver(self.guard, self, self.scheduler)
        self.core = EngineCore(self.scheduler, runner, self.clock, memory=self.guard.status, upkeep=driver.tick)
        self.tokens: dict[str, list[int]] = {}
        self.outputs: dict[str, TokenOutput] = {}

    def read(self) -> MemoryReading:
        """The reader that the guard asks."""
        left = 1.0 - self._taken_part_at(self.clock.now_s)
        return MemoryReading(Pressure.NORMAL, int(left * HEADROOM), 8 * GIB)

    def run_until(self, end_s: float) -> None:
        while self.clock.now_s < end_s:
            before_s = self.clock.now_s
            for output in self.core.step():
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                self.outputs[output.request_id] = output
            self.scheduler.check_invariants()
            if self.clock.now_s == before_s:
                self.clock.advance(0.1)

    def run_dry(self) -> None:
        while self.core.has_work:
            self.run_until(self.clock.now_s + 1.0)

    def check_answers(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            assert tuple(self.tokens[request.request_id]) == expected_answer(request)


def two_waves(now_s: float) -> float:
    """80% of the headroom is gone for 30 s, twice."""
    return 0.8 if 5 <= now_s < 35 or 60 <= now_s < 90 else 0.0


def test_two_waves_hold_newcomers_and_harm_nobody() -> None:
    office = Office(two_waves)
    early = [make_request(8, max_tokens=100) for _ in range(3)]
    for request in early:
        office.core.add(request)
    office.run_until(10.0)
    late = [make_request(8, max_tokens=20) for _ in range(3)]
    for request in late:
        office.core.add(request)
    office.run_until(34.0)

    told = office.core.snapshot()
    assert told.memory["guard_stage"] == "holding"
    assert told.memory["available_bytes"] == int((1 - 0.8) * HEADROOM)
    assert told.scheduler.waiting_on == {"headroom": 3}
    assert told.scheduler.num_running == 3
    assert not any(request.request_id in office.tokens for request in late)

    office.run_until(48.0)
    assert office.core.snapshot().memory["guard_stage"] == "calm"
    assert office.core.snapshot().scheduler.num_running == 6
    office.run_until(70.0)
    assert office.core.snapshot().memory["guard_stage"] == "holding"
    last = make_request(8, max_tokens=5)
    office.core.add(last)
    office.run_until(105.0)
    office.run_dry()

    office.check_answers([*early, *late, last])
    wave = ["drop_prefixes", "hold_admissions", "resume_admissions", "give_back"]
    assert [str(event.action) for event in office.guard.events] == wave * 2
    # Readings come once a second, steps of half a second lie between them.
    assert [event.at_s for event in office.guard.events] == pytest.approx([5, 7, 40, 45, 60, 62, 95, 100], abs=3)
    assert all("819 MiB of 4096 MiB" in event.reason for event in list(office.guard.events)[:2])
    stats = office.core.snapshot().scheduler
    assert stats.num_blocks_total == NUM_BLOCKS
    assert stats.num_blocks_free + stats.num_blocks_cached == NUM_BLOCKS
    assert stats.num_preemptions == 0
    timeline = office.outputs[last.request_id].timeline
    assert timeline is not None
    assert timeline.waited_s["headroom"] > 20.0  # type: ignore[index]


def test_next_to_nothing_left_preempts_all_but_one_and_all_are_answered() -> None:
    office = Office(lambda now_s: 0.95 if 5 <= now_s < 40 else 0.0)
    requests = [make_request(8, max_tokens=100) for _ in range(4)]
    for request in requests:
        office.core.add(request)
    office.run_until(39.0)
    told = office.core.snapshot()
    assert told.memory["guard_stage"] == "preempting"
    assert told.scheduler.num_running == 1
    office.run_until(60.0)
    assert office.core.snapshot().scheduler.num_waiting == 0
    assert office.core.snapshot().scheduler.num_running >= 3
    office.run_dry()
    office.check_answers(requests)
    assert office.core.snapshot().scheduler.num_preemptions >= 3


def test_prefixes_are_dropped_under_pressure_and_cached_again_afterwards() -> None:
    office = Office(lambda now_s: 0.6 if 20 <= now_s < 40 else 0.0)
    first = make_request(64, max_tokens=2, prompt_seed=1)
    office.core.add(first)
    office.run_until(19.0)
    assert office.core.snapshot().scheduler.num_blocks_cached > 0
    office.run_until(30.0)
    assert office.core.snapshot().memory["guard_stage"] == "trimmed"
    assert office.core.snapshot().scheduler.num_blocks_cached == 0
    office.run_until(60.0)
    again = [make_request(64, max_tokens=2, prompt_seed=1) for _ in range(2)]
    for request in again:
        office.core.add(request)
        office.run_dry()
    office.check_answers([first, *again])
    assert office.outputs[again[0].request_id].num_cached_tokens == 0
    assert office.outputs[again[1].request_id].num_cached_tokens > 0


def test_after_a_burst_a_request_of_half_the_pool_is_admitted_at_once() -> None:
    office = Office(lambda now_s: 0.0, slots=4, num_blocks=64)
    burst = [make_request(40, max_tokens=20) for _ in range(12)]
    for request in burst:
        office.core.add(request)
    office.run_dry()
    office.check_answers(burst)
    assert office.core.snapshot().scheduler.num_blocks_cached > 32
    asked_s = office.clock.now_s
    half = make_request(120, max_tokens=8, received_s=asked_s)
    office.core.add(half)
    office.run_dry()
    office.check_answers([half])
    timeline = office.outputs[half.request_id].timeline
    assert timeline is not None
    assert timeline.admitted_s == asked_s
