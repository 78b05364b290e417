"""Ways to choose a machine for a call, as bounds to compare a router with.

Owns: the protocol that the simulator asks, the central line, pinning. Must not know: events or step times. The fleet's
real routing policy stands in for these through the same protocol (serve_app/cli/plan_router.py).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import Protocol

from serve_app.capacity.machine import SimulatedCall, SimulatedMachine


class Dispatch(Protocol):
    """Chooses a machine for a call."""

    def choose(
        self, call: SimulatedCall, session: int, machines: Sequence[SimulatedMachine], now_s: float
    ) -> int | None:
        """Index of the machine, or None to keep the call in the fleet's one line until a machine has a free slot."""
        ...

    def changed(self, index: int, machines: Sequence[SimulatedMachine]) -> None:
        """A call came to or left machine ``index``, or it began another step."""
        ...

    def answered(self, call: SimulatedCall, index: int) -> None:
        """Machine ``index`` has answered ``call``."""
        ...


class CentralLine:
    """One line for the whole fleet. A call goes to the machine with the fewest calls, if that has a free slot, and
    among equals to one that is reading no prompt. A router that cannot know how long answers will be does no better."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, bool, int]] = []

    def choose(
        self, call: SimulatedCall, session: int, machines: Sequence[SimulatedMachine], now_s: float
    ) -> int | None:
        """The least busy machine, or None when all slots are taken."""
        if not self._heap:
            self._heap = [_state(index, machines) for index in range(len(machines))]
        # Every change of a machine left an entry; those that no longer tell the truth are dropped when they surface.
        while self._heap[0] != _state(self._heap[0][2], machines):
            heapq.heappop(self._heap)
        index = self._heap[0][2]
        return index if machines[index].num_free_slots else None

    def changed(self, index: int, machines: Sequence[SimulatedMachine]) -> None:
        """Note the machine's new state."""
        heapq.heappush(self._heap, _state(index, machines))

    def answered(self, call: SimulatedCall, index: int) -> None:
        """Nothing to learn."""


def _state(index: int, machines: Sequence[SimulatedMachine]) -> tuple[int, bool, int]:
    machine = machines[index]
    # Machines of unequal size compare by the slots that are left to them.
    return (-machine.num_free_slots, machine.is_reading, index)


class Pinned:
    """Every session stays on one machine, whatever happens there."""

    def choose(
        self, call: SimulatedCall, session: int, machines: Sequence[SimulatedMachine], now_s: float
    ) -> int | None:
        """A machine by the session's number alone."""
        return random.Random(session).randrange(len(machines))

    def changed(self, index: int, machines: Sequence[SimulatedMachine]) -> None:
        """Nothing to learn."""

    def answered(self, call: SimulatedCall, index: int) -> None:
        """Nothing to learn."""
