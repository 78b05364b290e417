"""A fleet on a virtual clock: calls arrive, are sent to machines, wait, are answered; sessions go on.

Owns: the events and their order. Must not know: step times (machine), which machine a call should go to (dispatch), or
what the results mean.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from engine.request import WaitReason
from serve_app.capacity.dispatch import CentralLine, Dispatch
from serve_app.capacity.machine import Finished, MachineSpec, MachineUse, SimulatedCall, SimulatedMachine
from serve_app.capacity.workload import PlannedCall, PlannedSession, Workload, plan_session, poisson_arrivals_s
from serve_app.latency import RequestTiming

# A prompt is one object repeated, so that long ones are cheap; where sessions part, each has a token of its own.
_FILLER = 7
_FIRST_OWN_TOKEN = 1000


@dataclass(frozen=True, slots=True)
class Load:
    """Sessions of ``workload`` that begin as a Poisson process."""

    workload: Workload
    sessions_per_s: float
    num_sessions: int
    seed: str = "7"
    warmup_share: float = 0.05


@dataclass(frozen=True, slots=True)
class SimulatedResult:
    """One answered call. ``timing`` has two moments, first and last token; its ``queue_s`` ends when the prompt is
    begun."""

    session_index: int
    class_name: str
    machine: int
    timing: RequestTiming
    num_cached_tokens: int
    waited_for_blocks_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """``results``: warm-up left out, in order of completion. ``uses``: per machine over ``duration_s``."""

    results: tuple[SimulatedResult, ...]
    duration_s: float
    uses: tuple[MachineUse, ...]


@dataclass
class _OpenCall:
    """A call on its way."""

    session: PlannedSession
    index: int
    received_s: float = 0.0
    machine: int = -1

    @property
    def plan(self) -> PlannedCall:
        return self.session.calls[self.index]

    @cached_property
    def asked(self) -> SimulatedCall:
        return _as_asked(self)


def simulate(
    specs: Sequence[MachineSpec], load: Load, dispatch: Dispatch | None = None, steps_at_once: int = 1
) -> Simulation:
    """Run ``load`` through a fleet to its end. Equal arguments give equal results."""
    return _Fleet(specs, load, dispatch or CentralLine(), steps_at_once).run()


class _Fleet:
    """The state of one simulation."""

    def __init__(self, specs: Sequence[MachineSpec], load: Load, dispatch: Dispatch, steps_at_once: int) -> None:
        self._machines = [SimulatedMachine(spec, steps_at_once) for spec in specs]
        self._load = load
        self._dispatch = dispatch
        self._arrivals = _poisson_sessions(load)
        self._order = count()
        self._calls: list[tuple[float, int, _OpenCall]] = []
        self._spans: list[tuple[float, int]] = []
        self._line: deque[_OpenCall] = deque()
        self._open: dict[str, _OpenCall] = {}
        self._results: list[SimulatedResult] = []
        self._now_s = 0.0

    def run(self) -> Simulation:
        """Take events in the order of time; at equal times spans end first, so that arrivals find the freed slots."""
        self._next_session()
        while self._calls or self._spans:
            span_s = self._spans[0][0] if self._spans else math.inf
            call_s = self._calls[0][0] if self._calls else math.inf
            if span_s <= call_s:
                self._now_s, index = heapq.heappop(self._spans)
                # An arrival that cut a jump short left the old end behind.
                if self._machines[index].ends_s == self._now_s:
                    self._end_span(index)
            else:
                self._now_s, _, call = heapq.heappop(self._calls)
                self._arrive(call)
        uses = tuple(machine.use for machine in self._machines)
        return Simulation(tuple(self._results), self._now_s, uses)

    def _next_session(self) -> None:
        upcoming = next(self._arrivals, None)
        if upcoming is not None:
            self._push_call(upcoming[0], _OpenCall(upcoming[1], 0))

    def _push_call(self, at_s: float, call: _OpenCall) -> None:
        call.received_s = at_s
        heapq.heappush(self._calls, (at_s, next(self._order), call))

    def _arrive(self, call: _OpenCall) -> None:
        if call.index == 0:
            self._next_session()
        if self._line or not self._send(call):
            self._line.append(call)

    def _send(self, call: _OpenCall) -> bool:
        """Give the call to a machine, unless it has to stay in line."""
        asked = call.asked
        index = self._dispatch.choose(asked, call.session.index, self._machines, self._now_s)
        if index is None:
            return False
        call.machine = index
        self._open[asked.call_id] = call
        machine = self._machines[index]
        ends_s = machine.ends_s
        machine.add(asked, self._now_s)
        if ends_s is None:
            self._start_span(index)
        elif machine.ends_s != ends_s:
            self._push_span(index)
        self._dispatch.changed(index, self._machines)
        return True

    def _end_span(self, index: int) -> None:
        machine = self._machines[index]
        for finished in machine.finish(self._now_s):
            self._record(finished)
        self._dispatch.changed(index, self._machines)
        # Whoever was sent here now has started the machine already.
        while self._line and self._send(self._line[0]):
            self._line.popleft()
        if machine.ends_s is None:
            self._start_span(index)
            self._dispatch.changed(index, self._machines)

    def _start_span(self, index: int) -> None:
        if self._machines[index].start(self._now_s) is not None:
            self._push_span(index)

    def _push_span(self, index: int) -> None:
        ends_s = self._machines[index].ends_s
        assert ends_s is not None
        heapq.heappush(self._spans, (ends_s, index))

    def _record(self, finished: Finished) -> None:
        call = self._open.pop(finished.call_id)
        result = _result(call, finished)
        self._dispatch.answered(call.asked, call.machine)
        if call.session.index >= self._load.num_sessions * self._load.warmup_share:
            self._results.append(result)
        if call.index + 1 < len(call.session.calls):
            following = _OpenCall(call.session, call.index + 1)
            self._push_call(self._now_s + following.plan.think_s, following)


def _poisson_sessions(load: Load) -> Iterator[tuple[float, PlannedSession]]:
    arrivals_s = poisson_arrivals_s(load.seed, load.sessions_per_s, load.num_sessions)
    for index, at_s in enumerate(arrivals_s):
        yield at_s, plan_session(load.workload, load.seed, index)


def _as_asked(call: _OpenCall) -> SimulatedCall:
    """The call's prompt: a shared head, then what only this session has, call after call the same and longer."""
    session, plan = call.session, call.plan
    head = (_FILLER,) * session.prefix_tokens
    own = (_FIRST_OWN_TOKEN + session.index,) + (_FILLER,) * (plan.prompt_tokens - session.prefix_tokens - 1)
    return SimulatedCall(
        call_id=f"{session.index}/{call.index}",
        prompt_token_ids=head + own,
        num_output_tokens=plan.output_tokens,
        received_s=call.received_s,
        cache_key="" if session.prefix_group is None else f"{session.class_name}/{session.prefix_group}",
        num_shared_tokens=session.prefix_tokens,
    )


def _result(call: _OpenCall, finished: Finished) -> SimulatedResult:
    marks = finished.timeline
    assert marks.prefill_started_s is not None
    assert marks.first_token_s is not None
    assert marks.finished_s is not None
    timing = RequestTiming(
        sent_s=call.received_s,
        chunk_times_s=(marks.first_token_s, marks.finished_s),
        num_prompt_tokens=call.plan.prompt_tokens,
        num_output_tokens=call.plan.output_tokens,
        queue_s=marks.prefill_started_s - call.received_s,
    )
    return SimulatedResult(
        call.session.index,
        call.session.class_name,
        call.machine,
        timing,
        finished.num_cached_tokens,
        marks.waited_s.get(WaitReason.BLOCKS, 0.0),
    )
