"""Keeps the machine usable: reads memory pressure once a second and makes room in steps, then gives everything back.

Owns: the stages, their thresholds and hysteresis, the record of what was done. Must not know: how memory is read, or
how a step is carried out; readings come in, actions go out.

    calm        all of the plan is used
    trimmed     cached prefixes are dropped, buffers that the array library keeps for reuse are released
    holding     and nobody is admitted any more: waiting requests wait for headroom
    preempting  and running requests are put back one at a time, the system having said that it is critical or
                nearly nothing being left

A stage is entered as soon as a reading asks for it, but one at a time and not before the step before had time to show.
It is left one at a time, after calm readings for ``calm_s`` without a break, against higher thresholds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from engine.memory.plan_inputs import MIB, PlanInputs

# Without a planned headroom (a fixed budget), this part of the machine stands in for it.
_STAND_IN_SHARE = 16
NUM_EVENTS_KEPT = 256


class Pressure(IntEnum):
    """What the operating system says of itself."""

    NORMAL = 0
    WARNING = 1
    CRITICAL = 2


class Stage(IntEnum):
    """How much room is being made."""

    CALM = 0
    TRIMMED = 1
    HOLDING = 2
    PREEMPTING = 3


class GuardAction(StrEnum):
    """What the engine is to do."""

    RELEASE_BUFFERS = "release_buffers"
    DROP_PREFIXES = "drop_prefixes"
    HOLD_ADMISSIONS = "hold_admissions"
    PREEMPT_ONE = "preempt_one"
    RESUME_ADMISSIONS = "resume_admissions"
    GIVE_BACK = "give_back"


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory at one moment; None is unknown.

    ``available_bytes``: what programs can get without swapping. ``footprint_bytes``: what the system charges this
    process with. ``reusable_bytes``: the part of it that the array library holds only for reuse, given back on demand
    and therefore never counted as used.
    """

    pressure: Pressure | None = None
    available_bytes: int | None = None
    footprint_bytes: int | None = None
    reusable_bytes: int = 0

    @property
    def used_bytes(self) -> int | None:
        """This process's footprint without what it holds only for reuse."""
        return None if self.footprint_bytes is None else max(0, self.footprint_bytes - self.reusable_bytes)

    @property
    def obtainable_bytes(self) -> int | None:
        """What other programs could get: available, and what this process gives back on demand."""
        return None if self.available_bytes is None else self.available_bytes + self.reusable_bytes


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """Thresholds are parts of ``headroom_bytes`` that are still obtainable: below ``enter`` a stage is asked for, above
    ``leave`` it is not needed. ``limit_bytes``: what this process may use in all.
    """

    headroom_bytes: int
    limit_bytes: int
    enter: tuple[float, float, float] = (0.5, 0.3, 0.1)
    leave: tuple[float, float, float] = (0.7, 0.5, 0.25)
    step_s: float = 2.0
    calm_s: float = 5.0
    max_hold_s: float = 60.0

    @classmethod
    def of(cls, inputs: PlanInputs) -> GuardConfig:
        """The guard of a plan."""
        headroom = inputs.applied_headroom_bytes or inputs.machine.total_bytes // _STAND_IN_SHARE
        return cls(headroom_bytes=headroom, limit_bytes=inputs.limit_bytes)


@dataclass(frozen=True, slots=True)
class GuardEvent:
    """One change of stage or one preemption, with the reading that caused it."""

    at_s: float
    action: GuardAction
    stage: Stage
    reason: str
    reading: MemoryReading


class MemoryGuard:
    """Decides from readings; time comes in."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.events: deque[GuardEvent] = deque(maxlen=NUM_EVENTS_KEPT)
        self.num_events = 0
        self._num_actions = dict.fromkeys(GuardAction, 0)
        self.stage = Stage.CALM
        self.last_reading: MemoryReading | None = None
        self._changed_s = float("-inf")
        self._calm_since_s: float | None = None
        # Set when holding had to end although pressure went on: admissions stay open until it gets worse.
        self._hold_given_up = False

    def observe(self, reading: MemoryReading, now_s: float) -> list[GuardAction]:
        """Take one reading and return what to do now, in order."""
        self.last_reading = reading
        asked = self._asked(reading)
        self._hold_given_up &= asked is not Stage.PREEMPTING
        self._note_calm(reading, now_s)
        due = now_s - self._changed_s >= self.config.step_s
        if self._held_in_vain(asked, now_s):
            return self._enter(Stage.TRIMMED, GuardAction.RESUME_ADMISSIONS, "pressure outlasts the hold", now_s)
        if due and (asked > self.stage or asked is Stage.PREEMPTING):
            return self._tighten(now_s)
        if self._calm_since_s is not None and now_s - self._calm_since_s >= self.config.calm_s:
            return self._ease(now_s)
        # What finished since the last reading may have left new prefixes.
        return [GuardAction.DROP_PREFIXES] if self.stage > Stage.CALM else []

    def status(self) -> dict[str, int | str | None]:
        """Facts for ``/status``; unknown is None."""
        reading = self.last_reading or MemoryReading()
        return {
            "guard_stage": self.stage.name.lower(),
            "guard_headroom_bytes": self.config.headroom_bytes,
            "guard_num_events": self.num_events,
            "guard_last_event": self.events[-1].reason if self.events else None,
            **{f"guard_action_{action}": number for action, number in self._num_actions.items()},
            "pressure": None if reading.pressure is None else reading.pressure.name.lower(),
            "available_bytes": reading.available_bytes,
            "footprint_bytes": reading.footprint_bytes,
            "used_bytes": reading.used_bytes,
            "reusable_bytes": reading.reusable_bytes,
        }

    def _asked(self, reading: MemoryReading) -> Stage:
        """The stage that a reading asks for."""
        asked = self._stage_below(reading, self.config.enter)
        if (reading.used_bytes or 0) > self.config.limit_bytes:
            asked = max(asked, Stage.TRIMMED)
        if reading.pressure is Pressure.WARNING:
            asked = max(asked, Stage.HOLDING)
        if reading.pressure is Pressure.CRITICAL or asked is Stage.PREEMPTING:
            return Stage.PREEMPTING
        return min(asked, Stage.TRIMMED) if self._hold_given_up else asked

    def _stage_below(self, reading: MemoryReading, thresholds: tuple[float, float, float]) -> Stage:
        if reading.obtainable_bytes is None:
            return Stage.CALM
        part = reading.obtainable_bytes / self.config.headroom_bytes
        return Stage(sum(part < threshold for threshold in thresholds))

    def _note_calm(self, reading: MemoryReading, now_s: float) -> None:
        unknown = reading.pressure is None and reading.obtainable_bytes is None
        needed = max(self._asked(reading), self._stage_below(reading, self.config.leave))
        if unknown or needed >= self.stage:
            self._calm_since_s = None
        elif self._calm_since_s is None:
            self._calm_since_s = now_s

    def _held_in_vain(self, asked: Stage, now_s: float) -> bool:
        held = self.stage is Stage.HOLDING and asked < Stage.PREEMPTING
        self._hold_given_up |= held and now_s - self._changed_s >= self.config.max_hold_s
        return held and self._hold_given_up

    def _tighten(self, now_s: float) -> list[GuardAction]:
        entering = {
            Stage.CALM: (Stage.TRIMMED, GuardAction.DROP_PREFIXES),
            Stage.TRIMMED: (Stage.HOLDING, GuardAction.HOLD_ADMISSIONS),
            Stage.HOLDING: (Stage.PREEMPTING, GuardAction.PREEMPT_ONE),
            Stage.PREEMPTING: (Stage.PREEMPTING, GuardAction.PREEMPT_ONE),
        }
        stage, action = entering[self.stage]
        return self._enter(stage, action, self._cause(), now_s)

    def _ease(self, now_s: float) -> list[GuardAction]:
        leaving = {
            Stage.TRIMMED: (Stage.CALM, GuardAction.GIVE_BACK),
            Stage.HOLDING: (Stage.TRIMMED, GuardAction.RESUME_ADMISSIONS),
            Stage.PREEMPTING: (Stage.HOLDING, GuardAction.DROP_PREFIXES),
        }
        stage, action = leaving[self.stage]
        self._hold_given_up &= stage is not Stage.CALM
        return self._enter(stage, action, self._cause(), now_s)

    def _enter(self, stage: Stage, action: GuardAction, reason: str, now_s: float) -> list[GuardAction]:
        assert self.last_reading is not None, "a stage changes only after a reading"
        self.stage, self._changed_s, self._calm_since_s = stage, now_s, None
        self.num_events += 1
        self._num_actions[action] += 1
        self.events.append(GuardEvent(now_s, action, stage, reason, self.last_reading))
        if action is GuardAction.DROP_PREFIXES and stage is Stage.TRIMMED:
            self._num_actions[GuardAction.RELEASE_BUFFERS] += 1
            return [GuardAction.RELEASE_BUFFERS, action]
        return [action]

    def _cause(self) -> str:
        """The reading in words, with its numbers."""
        reading, config = self.last_reading or MemoryReading(), self.config
        pressure = "unknown" if reading.pressure is None else reading.pressure.name.lower()
        return (
            f"{_mib(reading.obtainable_bytes)} of {_mib(config.headroom_bytes)} headroom obtainable, "
            f"{_mib(reading.used_bytes)} of {_mib(config.limit_bytes)} used, system pressure {pressure}"
        )


def _mib(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / MIB:.0f} MiB"
