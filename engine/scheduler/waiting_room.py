"""Everybody who waits: the queue, and those parked until another request's work is theirs to share.

Owns: where a waiting request is, how many tokens wait, and what each waits for. Must not know: blocks and slots.

A parked request waits for a key: the hash of a block that a running request is computing, or the request that it is a
fork of. It stands in nobody's way there. When the key is woken it goes back to its place in the queue, so parking never
costs a place in line; and what it waits for is always held by a request that waits for nobody parked, so no two can
wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from engine.request import WaitReason
from engine.scheduler.fairness import FairShares
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.request_state import Place, Request
from engine.scheduler.waiting_time import QueueClock

ParkingKey = bytes | Request


class WaitingRoom:
    """Requests without a slot."""

    def __init__(self, shares: FairShares) -> None:
        self.queue = RequestQueue(shares)
        self.clock = QueueClock()
        self._parked: dict[ParkingKey, dict[int, Request]] = {}
        self._key_of: dict[int, ParkingKey] = {}
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self.queue) + len(self._key_of)

    @property
    def num_tokens(self) -> int:
        """Known tokens of all waiting requests."""
        return self._num_tokens

    def requests(self) -> Iterator[Request]:
        """Every waiting request, in no order that matters."""
        yield from self.queue
        for group in self._parked.values():
            yield from group.values()

    def first(self, num_requests: int) -> list[Request]:
        """The first requests of the queue in order, then parked ones, ``num_requests`` at most."""
        found = self.queue.first(num_requests)
        parked = (request for group in self._parked.values() for request in group.values())
        return found + list(islice(parked, num_requests - len(found)))

    def enter(self, request: Request, now_s: float) -> None:
        """A request arrives, or comes back after preemption."""
        self._num_tokens += len(request.token_ids)
        self._to_queue(request, now_s)

    def leave(self, request: Request, now_s: float) -> None:
        """A request gets a slot, or is gone."""
        self._take_out(request)
        self._num_tokens -= len(request.token_ids)
        request.wait.stop(self.clock, now_s)
        request.place = Place.GONE

    def park(self, request: Request, key: ParkingKey, now_s: float) -> None:
        """Set a request aside until ``key`` is woken."""
        self._take_out(request)
        self._parked.setdefault(key, {})[request.arrival] = request
        self._key_of[request.arrival] = key
        request.place = Place.PARKED
        request.wait.start(WaitReason.PREFILL_TURN, self.clock, now_s)

    def wake(self, keys: Iterable[ParkingKey], now_s: float) -> None:
        """Return all who are parked on ``keys`` to their places in the queue."""
        if not self._parked:
            return
        for key in keys:
            for request in self._parked.pop(key, {}).values():
                del self._key_of[request.arrival]
                self._to_queue(request, now_s)

    def token_arrived(self) -> None:
        """A waiting request's token came out of a step that was in flight when it was preempted."""
        self._num_tokens += 1

    def count_by_reason(self) -> dict[str, int]:
        """How many requests wait for what."""
        counts: dict[str, int] = {}
        if self.queue:
            counts[self.clock.reason.value] = len(self.queue)
        if self._key_of:
            turn = WaitReason.PREFILL_TURN.value
            counts[turn] = counts.get(turn, 0) + len(self._key_of)
        return counts

    def check_invariants(self) -> None:
        """Raise AssertionError naming what does not add up."""
        waiting = list(self.requests())
        assert len(waiting) == len(self), "waiting requests are miscounted"
        assert sum(len(request.token_ids) for request in waiting) == self._num_tokens, "waiting tokens are miscounted"
        for request in self.queue:
            assert request.place is Place.QUEUE, f"{request.request_id} is queued and {request.place.value}"
        for key, group in self._parked.items():
            assert group, "nobody is parked on a key"
            for request in group.values():
                assert request.place is Place.PARKED, f"{request.request_id} is parked and {request.place.value}"
                assert self._key_of[request.arrival] == key, f"{request.request_id} is parked on another key"

    def _to_queue(self, request: Request, now_s: float) -> None:
        self.queue.push(request)
        request.place = Place.QUEUE
        request.wait.start_with_queue(self.clock, now_s)

    def _take_out(self, request: Request) -> None:
        if request.place is Place.QUEUE:
            self.queue.remove(request)
            return
        assert request.place is Place.PARKED, f"{request.request_id} does not wait"
        key = self._key_of.pop(request.arrival)
        group = self._parked[key]
        del group[request.arrival]
        if not group:
            del self._parked[key]
