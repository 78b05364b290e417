"""Whose prompt is read, and how a step's budget is divided among prompts."""

from __future__ import annotations

import math

import pytest

from engine.memory.kv_cache_manager import BlockTable
from engine.request import EngineRequest, SamplingParams
from engine.scheduler.fairness import FairShares
from engine.scheduler.prefill_turn import MAX_TIMES_PASSED, PrefillTurn, may_pass
from engine.scheduler.request_state import Request
from engine.scheduler.step_cost import ChunkBudget

MAX_CHUNK = 64


class Prompts:
    """Requests in slots, and whose turn it is."""

    def __init__(self) -> None:
        self.shares = FairShares()
        self.turn = PrefillTurn(self.shares, MAX_CHUNK)
        self.requests: list[Request] = []

    def add(self, num_tokens: int, user: str = "", priority: int = 0) -> Request:
        asked = EngineRequest(str(len(self.requests)), (1,) * num_tokens, SamplingParams(), 0.0, priority, user)
        request = Request(asked, len(self.requests), BlockTable(b""), 10_000, 0)
        self.shares.enter(user)
        self.requests.append(request)
        return request

    def step(
        self, num_tokens: int = MAX_CHUNK, seconds: float = math.inf, per_token_s: float = 0.001
    ) -> list[tuple[int, int]]:
        """One step's chunks as (arrival, tokens); they count as computed."""
        unread = [request for request in self.requests if request.num_uncomputed_tokens]
        budget = ChunkBudget(num_tokens, seconds, per_token_s, 0.0)
        chunks = self.turn.share_out(self.turn.order(unread), budget)
        for request, number in chunks:
            request.num_computed_tokens += number
        return [(request.arrival, number) for request, number in chunks]


def test_one_prompt_after_the_other() -> None:
    prompts = Prompts()
    prompts.add(100)
    prompts.add(100)
    assert [prompts.step() for _ in range(4)] == [[(0, 64)], [(0, 36), (1, 28)], [(1, 64)], [(1, 8)]]


def test_a_step_is_no_longer_than_its_seconds() -> None:
    """0.05 s are 50 tokens: the nearest multiple of 16 to the first prompt, nothing to the second."""
    prompts = Prompts()
    for _ in range(5):
        prompts.add(100)
    assert prompts.step(seconds=0.05) == [(0, 48)]
    assert prompts.step(seconds=0.060) == [(0, 52)]
    assert prompts.step(seconds=0.005) == [(1, 16)], "less than the smallest chunk is never read"


def test_what_the_first_prompt_leaves_goes_to_the_next() -> None:
    prompts = Prompts()
    for _ in range(4):
        prompts.add(20)
    assert prompts.step(seconds=0.061) == [(0, 20), (1, 20), (2, 20)]


@pytest.mark.parametrize("max_tokens", [1, 5, 12])
def test_a_budget_below_the_smallest_chunk_is_used_all_the_same(max_tokens: int) -> None:
    prompts = Prompts()
    prompts.add(30)
    assert prompts.step(max_tokens) == [(0, max_tokens)]


def test_the_least_served_user_is_next_but_does_not_interrupt() -> None:
    prompts = Prompts()
    prompts.add(100, "one")
    prompts.step()
    prompts.add(100, "one")
    prompts.add(130, "two")
    prompts.shares.charge("one", 64, 0)
    assert [prompts.step() for _ in range(2)] == [[(0, 36), (2, 28)], [(2, 64)]]


def test_the_more_urgent_does_interrupt() -> None:
    prompts = Prompts()
    prompts.add(100, priority=1)
    prompts.step()
    prompts.add(100, priority=0)
    assert prompts.step() == [(1, 64)]
    assert prompts.step() == [(1, 36), (0, 28)]


def test_short_ones_pass_until_the_passes_are_used_up() -> None:
    prompts = Prompts()
    long = prompts.add(6400)
    prompts.step()
    for _ in range(MAX_TIMES_PASSED):
        short = prompts.add(64)
        assert prompts.step() == [(short.arrival, 64)]
    prompts.add(64)
    assert prompts.step() == [(0, 64)]
    assert long.num_times_passed == MAX_TIMES_PASSED
    assert long.num_tokens_passed == 64 * MAX_TIMES_PASSED


def test_passes_of_one_step_count_together() -> None:
    prompts = Prompts()
    long = prompts.add(100)
    prompts.step(16)
    for _ in range(8):
        prompts.add(30)
    assert prompts.step(640) == [(1, 30), (2, 30), (3, 30), (0, 84), (4, 30), (5, 30), (6, 30), (7, 30), (8, 30)]
    assert (long.num_times_passed, long.num_tokens_passed) == (3, 90)


@pytest.mark.parametrize(
    ("num_tokens", "user", "expected"),
    [(50, "same", True), (51, "same", False), (100, "new", True), (101, "new", False), (128, "new", False)],
)
def test_who_is_short_enough(num_tokens: int, user: str, expected: bool) -> None:
    prompts = Prompts()
    ahead = prompts.add(100, "same")
    prompts.shares.selected("same")
    request = prompts.add(num_tokens, user)
    prompts.shares.charge("same", 10, 0)
    assert may_pass(request, ahead, prompts.shares, MAX_CHUNK) == expected


def test_as_long_is_short_enough_for_two_chunks_only() -> None:
    prompts = Prompts()
    ahead = prompts.add(1000, "old")
    prompts.shares.charge("old", 10, 0)
    assert may_pass(prompts.add(500, "new"), ahead, prompts.shares, MAX_CHUNK)
    assert not may_pass(prompts.add(501, "new"), ahead, prompts.shares, MAX_CHUNK)


def test_the_less_urgent_never_passes() -> None:
    prompts = Prompts()
    ahead = prompts.add(100)
    assert not may_pass(prompts.add(4, priority=1), ahead, prompts.shares, MAX_CHUNK)
