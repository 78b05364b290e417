"""The memory guard against scripted readings: steps in order, everything given back, no flapping, numbers in events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import load_engine_config
from engine.memory.guard import (
    GuardAction,
    GuardConfig,
    GuardEvent,
    MemoryGuard,
    MemoryReading,
    Pressure,
    Stage,
)
from engine.memory.guard_driver import GuardDriver, GuardHooks
from engine.memory.plan_inputs import GIB, MIB, MachineMemory, ModelBytes, PlanInputs

HEADROOM = 4 * GIB
CONFIG = GuardConfig(headroom_bytes=HEADROOM, limit_bytes=10 * GIB)
CALM = MemoryReading(Pressure.NORMAL, 2 * HEADROOM, 5 * GIB)


def left(part: float, pressure: Pressure | None = None) -> MemoryReading:
    """A reading with ``part`` of the headroom still available."""
    return MemoryReading(pressure, int(part * HEADROOM), 5 * GIB)


class ScriptedReader:
    """Gives one reading after another, the last one for ever."""

    def __init__(self, readings: Iterable[MemoryReading]) -> None:
        self._readings: Iterator[MemoryReading] = iter(readings)
        self._last = MemoryReading()
        self.num_reads = 0

    def read(self) -> MemoryReading:
        self.num_reads += 1
        self._last = next(self._readings, self._last)
        return self._last


class RecordingScheduler:
    """Notes what it is asked, and refuses what makes no sense."""

    def __init__(self) -> None:
        self.held = False
        self.num_dropped = 0
        self.num_preempted = 0

    def shrink_prefix_cache(self, num_blocks_kept: int) -> None:
        assert num_blocks_kept == 0
        self.num_dropped += 1

    def hold_admissions(self, held: bool) -> None:
        assert held != self.held, "asked for what is so already"
        self.held = held

    def preempt_one(self, now_s: float) -> bool:
        assert self.held, "preempted while newcomers could take the room"
        self.num_preempted += 1
        return True


def play(guard: MemoryGuard, readings: Iterable[MemoryReading], start_s: float = 0.0) -> list[Stage]:
    stages = []
    for second, reading in enumerate(readings):
        guard.observe(reading, start_s + second)
        stages.append(guard.stage)
    return stages


def actions(guard: MemoryGuard) -> list[str]:
    return [str(event.action) for event in guard.events]


def test_a_wave_is_answered_in_steps_and_everything_is_given_back() -> None:
    guard = MemoryGuard(CONFIG)
    stages = play(guard, [CALM] * 3 + [left(0.2)] * 30 + [CALM] * 15)
    assert stages[2] is Stage.CALM
    assert stages[3] is Stage.TRIMMED
    assert stages[4:33] == [Stage.TRIMMED] + [Stage.HOLDING] * 28
    assert stages[-1] is Stage.CALM
    assert actions(guard) == ["drop_prefixes", "hold_admissions", "resume_admissions", "give_back"]


def test_two_waves_tell_their_story_with_numbers() -> None:
    guard = MemoryGuard(CONFIG)
    wave = [left(0.2)] * 30 + [CALM] * 15
    play(guard, wave * 2)
    assert actions(guard) == ["drop_prefixes", "hold_admissions", "resume_admissions", "give_back"] * 2
    assert guard.events[0].reason == (
        "819 MiB of 4096 MiB headroom obtainable, 5120 MiB of 10240 MiB used, system pressure unknown"
    )
    assert guard.status()["guard_stage"] == "calm"
    assert guard.status()["guard_num_events"] == 8


def test_preemption_comes_last_and_one_at_a_time() -> None:
    guard = MemoryGuard(CONFIG)
    stages = play(guard, [left(0.05)] * 9)
    assert stages == [Stage.TRIMMED] * 2 + [Stage.HOLDING] * 2 + [Stage.PREEMPTING] * 5
    assert actions(guard) == ["drop_prefixes", "hold_admissions", "preempt_one", "preempt_one", "preempt_one"]
    play(guard, [CALM] * 20, start_s=9)
    assert guard.stage is Stage.CALM
    assert actions(guard)[5:] == ["drop_prefixes", "resume_admissions", "give_back"]


@pytest.mark.parametrize(
    ("pressure", "stage"),
    [(Pressure.NORMAL, Stage.CALM), (Pressure.WARNING, Stage.HOLDING), (Pressure.CRITICAL, Stage.PREEMPTING)],
)
def test_what_the_system_says_counts_even_with_memory_left(pressure: Pressure, stage: Stage) -> None:
    guard = MemoryGuard(CONFIG)
    assert play(guard, [left(2.0, pressure)] * 10)[-1] is stage


def test_buffers_kept_for_reuse_are_not_counted_as_used() -> None:
    reading = MemoryReading(Pressure.NORMAL, HEADROOM // 10, 12 * GIB, reusable_bytes=3 * GIB)
    guard = MemoryGuard(CONFIG)
    assert play(guard, [reading] * 5)[-1] is Stage.CALM
    assert guard.status()["used_bytes"] == 9 * GIB


def test_own_growth_beyond_the_plan_trims() -> None:
    guard = MemoryGuard(CONFIG)
    assert play(guard, [MemoryReading(Pressure.NORMAL, 2 * HEADROOM, 11 * GIB)] * 5)[-1] is Stage.TRIMMED


def test_readings_around_a_threshold_do_not_flap() -> None:
    guard = MemoryGuard(CONFIG)
    play(guard, [left(0.49 if second % 2 else 0.52) for second in range(300)])
    assert actions(guard) == ["drop_prefixes"]


def test_a_short_calm_gives_nothing_back() -> None:
    guard = MemoryGuard(CONFIG)
    play(guard, ([left(0.2)] * 4 + [CALM] * 4) * 7)
    assert actions(guard) == ["drop_prefixes", "hold_admissions"]


def test_unknown_readings_change_nothing() -> None:
    guard = MemoryGuard(CONFIG)
    assert play(guard, [MemoryReading()] * 20)[-1] is Stage.CALM
    play(guard, [left(0.2)] * 5, start_s=20)
    assert play(guard, [MemoryReading()] * 20, start_s=25)[-1] is Stage.HOLDING
    assert guard.status()["available_bytes"] is None
    assert guard.status()["pressure"] is None


def test_pressure_that_stays_does_not_close_the_engine_for_ever() -> None:
    guard = MemoryGuard(CONFIG)
    stages = play(guard, [left(0.2)] * 200)
    assert stages[62] is Stage.TRIMMED
    assert set(stages[62:]) == {Stage.TRIMMED}
    assert actions(guard) == ["drop_prefixes", "hold_admissions", "resume_admissions"]
    worse = play(guard, [left(0.05)] * 4, start_s=200)
    assert worse[-1] is Stage.PREEMPTING
    play(guard, [CALM] * 20, start_s=204)
    assert play(guard, [left(0.2)] * 4, start_s=224)[-1] is Stage.HOLDING


def test_the_guard_of_a_plan() -> None:
    machine = MachineMemory(64 * GIB, 50 * GIB, GIB)
    model = ModelBytes(GIB, 1024, 32_000)
    auto = PlanInputs.of(load_engine_config({}), machine, model, 4096)
    assert GuardConfig.of(auto).headroom_bytes == 8 * GIB
    assert GuardConfig.of(auto).limit_bytes == (64 - 13 - 8) * GIB
    fixed = PlanInputs.of(load_engine_config({"memory": {"budget": "8GiB"}}), machine, model, 4096)
    assert GuardConfig.of(fixed).headroom_bytes == 4 * GIB


def test_the_driver_reads_once_a_second_and_asks_the_right_one() -> None:
    reader, scheduler = ScriptedReader([CALM] + [left(0.05)] * 9 + [CALM]), RecordingScheduler()
    tight: list[bool] = []
    told: list[GuardEvent] = []
    driver = GuardDriver(
        MemoryGuard(CONFIG), reader, scheduler, GuardHooks(set_tight=tight.append, on_event=told.append)
    )
    for tenth in range(300):
        driver.tick(tenth / 10)
    assert reader.num_reads == 30
    assert scheduler.num_preempted == 3
    assert not scheduler.held
    assert scheduler.num_dropped > 5
    assert tight == [True, False]
    assert told == list(driver.guard.events)


def test_the_driver_adds_what_the_array_library_holds_for_reuse() -> None:
    driver = GuardDriver(
        MemoryGuard(CONFIG),
        ScriptedReader([left(0.2)]),
        RecordingScheduler(),
        GuardHooks(reusable_bytes=lambda: 3 * GIB),
    )
    driver.tick(0.0)
    assert driver.guard.stage is Stage.CALM
    assert driver.guard.status()["reusable_bytes"] == 3 * GIB


readings = st.builds(
    MemoryReading,
    st.none() | st.sampled_from(Pressure),
    st.none() | st.integers(0, 2 * HEADROOM),
    st.none() | st.integers(0, 12 * GIB),
    st.integers(0, 200 * MIB),
)


@given(st.lists(st.tuples(readings, st.integers(1, 8)), max_size=40))
def test_any_readings_keep_the_order_and_calm_gives_everything_back(
    runs: list[tuple[MemoryReading, int]],
) -> None:
    scheduler, tight = RecordingScheduler(), [False]
    script = [reading for reading, times in runs for _ in range(times)] + [CALM] * 40
    guard = MemoryGuard(CONFIG)
    hooks = GuardHooks(set_tight=lambda value: tight.append(value))
    driver = GuardDriver(guard, ScriptedReader(script), scheduler, hooks)
    before = guard.stage
    for second in range(len(script)):
        driver.tick(float(second))
        assert abs(guard.stage - before) <= 1
        assert scheduler.held == (guard.stage >= Stage.HOLDING)
        assert tight[-1] == (guard.stage > Stage.CALM)
        before = guard.stage
    assert guard.stage is Stage.CALM
    assert len(tight) == 1 or tight[1::2] == [True] * (len(tight) // 2)
    assert all(event.action is not GuardAction.RELEASE_BUFFERS for event in guard.events)
