"""Routing rules that stand beside the policy. Each is given the requests in order and says which machine gets them.

Owns: the rules. Must not know: how machines work inside. Every rule but the policy sees the machines as they are at
that moment; the policy sees what a router in a fleet sees, reports that are old when they arrive.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from serve_app.routing.policy import RoutingPolicy, RoutingRequest
from serve_app.routing.report import ReplicaReport
from serve_app.routing.simulation.machine import Job, Machine

STICKY_MOVE_TOKENS = 20_000


class Rule(Protocol):
    """A way to choose."""

    wants_reports: bool

    def choose(self, job: Job, machines: Sequence[Machine], now_s: float) -> int:
        """Return the number of the machine that gets ``job``."""
        ...

    def report(self, number: int, report: ReplicaReport, now_s: float) -> None:
        """A report of machine ``number`` has arrived."""
        ...

    def finished(self, job: Job, number: int) -> None:
        """``job`` has ended at machine ``number``."""
        ...


class _SeesMachines:
    wants_reports = False

    def report(self, number: int, report: ReplicaReport, now_s: float) -> None:
        """Not needed."""

    def finished(self, job: Job, number: int) -> None:
        """Not needed."""


class RoundRobin(_SeesMachines):
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, job: Job, machines: Sequence[Machine], now_s: float) -> int:
        """Return the next one."""
        self._next += 1
        return (self._next - 1) % len(machines)


class PowerOfTwo(_SeesMachines):
    """The less loaded of two at random: Ray Serve's own rule."""

    def __init__(self, seed: int = 5) -> None:
        self._draw = random.Random(seed)

    def choose(self, job: Job, machines: Sequence[Machine], now_s: float) -> int:
        """Return the better of two."""
        if len(machines) == 1:
            return 0
        one, other = self._draw.sample(range(len(machines)), 2)
        return min((one, other), key=lambda number: machines[number].num_requests)


class Sticky(_SeesMachines):
    """Home, unless home is busy and the prompt is short enough to be read again elsewhere.

    Home idle: home. Home busy, another idle, the prompt at most ``STICKY_MOVE_TOKENS``: that one becomes home. Else it
    waits at home. Idle means that a slot is free; of several the one that has served least.
    """

    def __init__(self) -> None:
        self._homes: dict[int, int] = {}

    def choose(self, job: Job, machines: Sequence[Machine], now_s: float) -> int:
        """Return home, or another that becomes it."""
        home = self._homes.get(job.prefix.conversation)
        idle = [number for number, machine in enumerate(machines) if machine.num_requests < machine.kind.slots]
        if home is None:
            chosen = _least_served(idle, machines) if idle else _least_loaded(machines)
        elif home in idle or not idle or job.prefix.num_prompt_tokens > STICKY_MOVE_TOKENS:
            chosen = home
        else:
            chosen = _least_served(idle, machines)
        self._homes[job.prefix.conversation] = chosen
        return chosen


class Policy:
    """The policy of this package in ``num_routers`` routers that do not talk to each other; requests come to any."""

    wants_reports = True

    def __init__(self, num_machines: int, num_routers: int = 1, seed: int = 7) -> None:
        self._draw = random.Random(seed)
        self._routers = [RoutingPolicy() for _ in range(num_routers)]
        self._at: dict[str, RoutingPolicy] = {}
        for router in self._routers:
            for number in range(num_machines):
                router.report(str(number), str(number), None, 0.0)

    def choose(self, job: Job, machines: Sequence[Machine], now_s: float) -> int:
        """Return what one of the routers chooses."""
        router = self._draw.choice(self._routers)
        decision = router.choose(RoutingRequest(job.request_id, job.prefix, job.place), now_s)
        assert decision is not None, "a fleet without machines"
        router.taken(job.request_id, decision.chosen.replica, now_s)
        self._at[job.request_id] = router
        return int(decision.chosen.replica)

    def report(self, number: int, report: ReplicaReport, now_s: float) -> None:
        """Every router gets it."""
        for router in self._routers:
            router.report(str(number), str(number), report, now_s)

    def finished(self, job: Job, number: int) -> None:
        """Its own router learns at once."""
        self._at.pop(job.request_id).came_back(job.request_id, str(number))


def _least_served(numbers: Sequence[int], machines: Sequence[Machine]) -> int:
    return min(numbers, key=lambda number: machines[number].num_served)


def _least_loaded(machines: Sequence[Machine]) -> int:
    return min(range(len(machines)), key=lambda number: machines[number].num_requests)
