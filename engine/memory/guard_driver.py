"""Carries out what the memory guard decides, once per interval, on whoever can do it.

Owns: when to read, and which action calls what. Must not know: how memory is read, the scheduler, or the array library;
they come in behind protocols.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.memory.guard import GuardAction, GuardEvent, MemoryGuard, MemoryReading

READ_INTERVAL_S = 1.0


class MemoryReader(Protocol):
    """Reads memory now."""

    def read(self) -> MemoryReading:
        """Return one reading; what cannot be read is None. Never raises for it."""
        ...


class GuardedScheduler(Protocol):
    """What the guard asks of the scheduler."""

    def shrink_prefix_cache(self, num_blocks_kept: int) -> object:
        """Forget cached prefixes beyond ``num_blocks_kept`` blocks."""
        ...

    def hold_admissions(self, held: bool) -> None:
        """Admit nobody while ``held``."""
        ...

    def preempt_one(self, now_s: float) -> bool:
        """Put one running request back; False when nothing runs."""
        ...


@dataclass(frozen=True, slots=True)
class GuardHooks:
    """What the array library and the log are asked to do.

    ``reusable_bytes``: what the library holds for reuse only. ``set_tight``: True gives that back to the system and
    lets unused parts of the pool leave memory, False ends it. ``on_event``: told of every event.
    """

    reusable_bytes: Callable[[], int] = lambda: 0
    set_tight: Callable[[bool], None] = lambda tight: None
    on_event: Callable[[GuardEvent], None] = lambda event: None


class GuardDriver:
    """Call ``tick`` from the engine's loop, as often as it turns."""

    def __init__(
        self, guard: MemoryGuard, reader: MemoryReader, scheduler: GuardedScheduler, hooks: GuardHooks | None = None
    ) -> None:
        self.guard = guard
        self._reader = reader
        self._scheduler = scheduler
        self._hooks = hooks or GuardHooks()
        self._next_read_s = float("-inf")

    def tick(self, now_s: float) -> None:
        """Read and act when an interval has passed since the last time; else return at once."""
        if now_s < self._next_read_s:
            return
        self._next_read_s = now_s + READ_INTERVAL_S
        reading = self._reader.read()
        reusable_bytes = reading.reusable_bytes + self._hooks.reusable_bytes()
        reading = MemoryReading(reading.pressure, reading.available_bytes, reading.footprint_bytes, reusable_bytes)
        num_events = self.guard.num_events
        for action in self.guard.observe(reading, now_s):
            self._act(action, now_s)
        if self.guard.num_events > num_events:
            self._hooks.on_event(self.guard.events[-1])

    def _act(self, action: GuardAction, now_s: float) -> None:
        match action:
            case GuardAction.RELEASE_BUFFERS:
                self._hooks.set_tight(True)
            case GuardAction.GIVE_BACK:
                self._hooks.set_tight(False)
            case GuardAction.DROP_PREFIXES:
                self._scheduler.shrink_prefix_cache(0)
            case GuardAction.HOLD_ADMISSIONS:
                self._scheduler.hold_admissions(True)
            case GuardAction.RESUME_ADMISSIONS:
                self._scheduler.hold_admissions(False)
            case GuardAction.PREEMPT_ONE:
                self._scheduler.preempt_one(now_s)
