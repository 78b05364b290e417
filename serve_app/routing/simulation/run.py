"""Runs requests through a rule and machines, and says what people would have felt. Pure: the clock is virtual.

Owns: the order of events, and the figures. Must not know: how a rule chooses.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from serve_app.latency import percentile
from serve_app.routing.report import ReplicaReport
from serve_app.routing.simulation.machine import Job, Machine, MachineKind
from serve_app.routing.simulation.rules import Rule

REPORT_PERIOD_S = 0.5
# A replica's report goes by its controller to the routers.
REPORT_DELAY_S = 0.5
# A machine that does nothing new says so less often here; it costs nothing but events.
IDLE_PERIODS = 7
WARM_UP_SHARE = 0.1


class _Kind(IntEnum):
    MACHINE = 0
    RECORD = 1
    DELIVER = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run, without its warm-up. Waits: from sending to the start of reading. ``load_ratio``: max / mean load."""

    num_requests: int
    wait_mean_s: float
    wait_p95_s: float
    ttft_p95_s: float
    e2e_mean_s: float
    cached_share: float
    num_computed_prompt_tokens: int
    load_ratio: float
    served_ratio: float


@dataclass(slots=True)
class _Fleet:
    rule: Rule
    machines: list[Machine]
    events: list[tuple[float, int, int, int, ReplicaReport | None]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)

    def run_until(self, until_s: float) -> None:
        while self.events and self.events[0][0] <= until_s:
            now_s, kind, number, version, report = heapq.heappop(self.events)
            if kind == _Kind.MACHINE:
                if version == self.versions[number]:
                    self._advance(number, now_s)
            elif kind == _Kind.RECORD:
                self._record(number, now_s)
            else:
                assert report is not None
                self.rule.report(number, report, now_s)

    def add(self, job: Job) -> None:
        number = self.rule.choose(job, self.machines, job.sent_s)
        self._advance(number, job.sent_s, job)

    def start_reports(self) -> None:
        for number in range(len(self.machines)):
            offset_s = REPORT_PERIOD_S * number / len(self.machines)
            heapq.heappush(self.events, (offset_s, _Kind.RECORD, number, 0, None))

    def _advance(self, number: int, now_s: float, job: Job | None = None) -> None:
        machine = self.machines[number]
        for finished in machine.advance(now_s):
            self.rule.finished(finished, number)
        if job is not None:
            machine.add(job)
        self.changed[number] = IDLE_PERIODS
        self.versions[number] += 1
        next_s = machine.next_event_s()
        if next_s < math.inf:
            heapq.heappush(self.events, (next_s, _Kind.MACHINE, number, self.versions[number], None))

    def _record(self, number: int, now_s: float) -> None:
        self.changed[number] += 1
        if self.changed[number] >= IDLE_PERIODS:
            self._advance(number, now_s)
            self.changed[number] = 0
            report = self.machines[number].report()
            heapq.heappush(self.events, (now_s + REPORT_DELAY_S, _Kind.DELIVER, number, 0, report))
        heapq.heappush(self.events, (now_s + REPORT_PERIOD_S, _Kind.RECORD, number, 0, None))


def run(rule: Rule, kinds: Sequence[MachineKind], jobs: Iterable[Job]) -> Outcome:
    """Send ``jobs`` through ``rule`` to one machine of each of ``kinds``, until all are answered."""
    fleet = _Fleet(rule, [Machine(kind) for kind in kinds])
    fleet.versions = [0] * len(kinds)
    fleet.changed = [0] * len(kinds)
    if rule.wants_reports:
        fleet.start_reports()
    done: list[Job] = []
    for job in jobs:
        fleet.run_until(job.sent_s)
        fleet.add(job)
        done.append(job)
    end_s = done[-1].sent_s
    rule.wants_reports = False
    while any(machine.num_requests for machine in fleet.machines):
        end_s += 60.0
        fleet.run_until(end_s)
    return _outcome(done, fleet.machines)


def _outcome(jobs: Sequence[Job], machines: Sequence[Machine]) -> Outcome:
    jobs = jobs[int(len(jobs) * WARM_UP_SHARE) :]
    waits_s = sorted(job.read_from_s - job.sent_s for job in jobs)
    ttfts_s = sorted(job.first_token_s - job.sent_s for job in jobs)
    prompt_tokens = sum(job.prefix.num_prompt_tokens for job in jobs)
    cached_tokens = sum(job.num_cached_tokens for job in jobs)
    # A machine of twice the slots is meant to carry twice the load.
    loads = [machine.request_seconds / machine.kind.slots for machine in machines]
    served = [machine.num_served / machine.kind.slots for machine in machines]
    return Outcome(
        num_requests=len(jobs),
        wait_mean_s=sum(waits_s) / len(jobs),
        wait_p95_s=percentile(waits_s, 95),
        ttft_p95_s=percentile(ttfts_s, 95),
        e2e_mean_s=sum(job.finished_s - job.sent_s for job in jobs) / len(jobs),
        cached_share=cached_tokens / prompt_tokens,
        num_computed_prompt_tokens=prompt_tokens - cached_tokens,
        load_ratio=max(loads) * len(loads) / sum(loads),
        served_ratio=max(served) * len(served) / sum(served),
    )
