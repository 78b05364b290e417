"""The queue of requests without a slot: priority, then the user served least, then arrival.

Owns: the order. Reading the head costs O(log users), however many wait. Must not know: what a request needs to run.

Counters move while their users wait (their other requests are being served), so no sorted structure over requests
would stay sorted. Here each user has a line in order of arrival, and a heap orders the users. Counters only grow: an
outdated heap entry comes up too early, never too late, and is put right when it does.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from engine.scheduler.fairness import FairShares
from engine.scheduler.request_state import Request

_arrival = attrgetter("arrival")
_HeapKey = tuple[float, int, str]
_NUM_DEAD_KEYS_KEPT = 64


@dataclass(slots=True)
class _Line:
    """One user's requests by arrival. ``key`` is the heap entry that counts; others for this user are dead."""

    requests: list[Request] = field(default_factory=list)
    key: _HeapKey | None = None


@dataclass(slots=True)
class _Level:
    """All requests of one priority."""

    lines: dict[str, _Line] = field(default_factory=dict)
    heap: list[_HeapKey] = field(default_factory=list)


class RequestQueue:
    """Waiting requests in the order in which they should run."""

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        """Every request, in no order that matters."""
        for level in self._levels.values():
            for line in level.lines.values():
                yield from line.requests

    def push(self, request: Request) -> None:
        """Put a request where its priority, user and arrival say: one that was preempted gets its old place."""
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = _Level()
            insort(self._priorities, request.priority)
        line = level.lines.setdefault(request.user, _Line())
        insort(line.requests, request, key=_arrival)
        if line.key is None or line.requests[0] is request:
            self._put_in_heap(level, line)
        self._num_requests += 1

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        level = self._levels[request.priority]
        line = level.lines[request.user]
        index = bisect_left(line.requests, request.arrival, key=_arrival)
        assert line.requests[index] is request, f"{request.request_id} is not in its user's line"
        del line.requests[index]
        self._num_requests -= 1
        if not line.requests:
            del level.lines[request.user]
            if not level.lines:
                del self._levels[request.priority]
                self._priorities.remove(request.priority)

    def head(self) -> Request | None:
        """The request that should run next."""
        first = self.first(1)
        return first[0] if first else None

    def first(self, num_requests: int) -> list[Request]:
        """The first requests of the most urgent priority, in order, at most ``num_requests``."""
        if not self._priorities:
            return []
        level = self._levels[self._priorities[0]]
        taken: dict[_HeapKey, None] = {}
        found: list[Request] = []
        while len(found) < num_requests and (line := self._least_served(level)) is not None:
            key = heapq.heappop(level.heap)
            if key not in taken:
                taken[key] = None
                found += line.requests[: num_requests - len(found)]
        for key in taken:
            heapq.heappush(level.heap, key)
        return found

    def _least_served(self, level: _Level) -> _Line | None:
        """The line at the top of the heap, once dead and outdated entries are gone."""
        while level.heap:
            key = level.heap[0]
            line = level.lines.get(key[2])
            if line is None or line.key != key:
                heapq.heappop(level.heap)
            elif key[:2] != (self._shares[key[2]].counter, line.requests[0].arrival):
                heapq.heappop(level.heap)
                self._put_in_heap(level, line)
            else:
                return line
        return None

    def _put_in_heap(self, level: _Level, line: _Line) -> None:
        first = line.requests[0]
        line.key = (self._shares[first.user].counter, first.arrival, first.user)
        heapq.heappush(level.heap, line.key)
        if len(level.heap) > 2 * len(level.lines) + _NUM_DEAD_KEYS_KEPT:
            level.heap = [line.key for line in level.lines.values() if line.key is not None]
            heapq.heapify(level.heap)
