"""The queue's order against plain sorting, fair shares, and the account of waits."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.memory.kv_cache_manager import BlockTable
from engine.request import EngineRequest, SamplingParams, WaitReason
from engine.scheduler.fairness import OUTPUT_TOKEN_WEIGHT, FairShares
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.request_state import Request
from engine.scheduler.waiting_room import WaitingRoom
from engine.scheduler.waiting_time import QueueClock, WaitAccount

USERS = ("ann", "bob", "cyd")


def make_waiting(arrival: int, user: str = "", priority: int = 0, num_prompt: int = 4) -> Request:
    asked = EngineRequest(f"r{arrival}", (1,) * num_prompt, SamplingParams(), 0.0, priority, user)
    return Request(asked, arrival, BlockTable(b""), 100, 0)


class QueueMachine(RuleBasedStateMachine):
    """Pushes, removals and service in any order: the head is always what sorting all requests says."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = FairShares()
        self.queue = RequestQueue(self.shares)
        self.waiting: list[Request] = []
        self.taken: list[Request] = []
        self.arrivals = count()

    @rule(user=st.sampled_from(USERS), priority=st.sampled_from([0, 0, 5]))
    def arrive(self, user: str, priority: int) -> None:
        request = make_waiting(next(self.arrivals), user, priority)
        self.shares.enter(user)
        self.queue.push(request)
        self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule()
    def admit(self) -> None:
        request = self.queue.head()
        assert request is not None
        self.queue.remove(request)
        self.shares.selected(request.user)
        self.waiting.remove(request)
        self.taken.append(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        self.queue.remove(request)
        self.waiting.remove(request)
        self.shares.leave(request.user)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.taken))
        self.taken.remove(request)
        self.queue.push(request)
        self.waiting.append(request)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), num_tokens=st.integers(0, 30))
    def serve(self, data: st.DataObject, num_tokens: int) -> None:
        self.shares.charge(data.draw(st.sampled_from(self.taken)).user, num_tokens, num_tokens)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.taken))
        self.taken.remove(request)
        self.shares.leave(request.user)

    @invariant()
    def is_sorted(self) -> None:
        def first_of(user: str, priority: int) -> int:
            return min(r.arrival for r in self.waiting if r.user == user and r.priority == priority)

        ordered = sorted(
            self.waiting,
            key=lambda r: (
                r.priority,
                self.shares[r.user].counter,
                first_of(r.user, r.priority),
                r.user,
                r.arrival,
            ),
        )
        most_urgent = [r for r in ordered if r.priority == ordered[0].priority]
        assert len(self.queue) == len(self.waiting)
        assert self.queue.head() is (ordered[0] if ordered else None)
        assert self.queue.first(5) == most_urgent[:5]
        assert {r.arrival for r in self.queue} == {r.arrival for r in self.waiting}


QueueMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
test_the_queue_is_sorted = QueueMachine.TestCase


def test_a_user_who_comes_back_starts_at_the_present_level() -> None:
    shares = FairShares()
    shares.enter("old")
    shares.charge("old", 1000, 0)
    shares.selected("old")
    shares.enter("new")
    assert shares["new"].counter == 1000
    shares.charge("new", 0, 10)
    assert shares["new"].counter == 1000 + 10 * OUTPUT_TOKEN_WEIGHT
    shares.leave("new")
    shares.enter("new")
    assert shares["new"].counter == 1000 + 10 * OUTPUT_TOKEN_WEIGHT, "leaving does not wipe out what was served"


def test_an_idle_engine_forgets_all_debts() -> None:
    shares = FairShares()
    shares.enter("one")
    shares.charge("one", 50, 0)
    shares.leave("one")
    shares.enter("one")
    assert shares["one"].counter == 0.0


def test_users_who_went_away_are_forgotten() -> None:
    shares = FairShares()
    shares.enter("stays")
    for number in range(5000):
        shares.enter(f"user-{number}")
        shares.selected(f"user-{number}")
        shares.leave(f"user-{number}")
    assert len(shares._shares) < 2000


@pytest.mark.parametrize(
    ("num_users", "num_slots", "expected"), [(0, 8, 8), (1, 8, 8), (2, 8, 4), (3, 8, 2), (20, 8, 1)]
)
def test_fair_slots(num_users: int, num_slots: int, expected: int) -> None:
    shares = FairShares()
    for number in range(num_users):
        shares.enter(str(number))
    assert shares.fair_slots(num_slots) == expected


def test_the_queues_reasons_are_divided_among_those_who_were_there() -> None:
    clock = QueueClock()
    early, late = WaitAccount(), WaitAccount()
    early.start_with_queue(clock, 0.0)
    clock.set_reason(WaitReason.SLOTS, 1.0)
    late.start_with_queue(clock, 2.0)
    clock.set_reason(WaitReason.BLOCKS, 4.0)
    early.stop(clock, 5.0)
    late.start(WaitReason.PREFILL_TURN, clock, 5.5)
    late.start(WaitReason.PREFILL_TURN, clock, 6.0)
    late.stop(clock, 7.0)
    late.stop(clock, 9.0)
    assert early.waited_s == {WaitReason.PREFILL_TURN: 1.0, WaitReason.SLOTS: 3.0, WaitReason.BLOCKS: 1.0}
    assert late.waited_s == {WaitReason.SLOTS: 2.0, WaitReason.BLOCKS: 1.5, WaitReason.PREFILL_TURN: 1.5}


def test_a_parked_request_keeps_its_place_in_line() -> None:
    shares = FairShares()
    room = WaitingRoom(shares)
    first, second, third = (make_waiting(arrival) for arrival in range(3))
    for request in (first, second, third):
        shares.enter("")
        room.enter(request, 0.0)
    room.park(first, b"key", 1.0)
    room.park(second, third, 1.0)
    assert room.queue.head() is third
    assert (len(room), room.num_tokens) == (3, 12)
    room.wake((b"other", b"key"), 3.0)
    assert room.queue.head() is first
    room.leave(second, 3.0)
    room.wake((third,), 4.0)
    assert [r.arrival for r in room.queue.first(9)] == [0, 2]
    room.leave(first, 4.0)
    assert first.wait.waited_s == {WaitReason.PREFILL_TURN: 4.0}
    assert room.count_by_reason() == {"prefill_turn": 1}
    room.check_invariants()
