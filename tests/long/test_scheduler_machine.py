"""Anything in any order: random walks over the scheduler, with every invariant checked after every move.

Whatever happens around a request, it gets the answer that it would get alone, or the end that it was given; and when
all is over, nothing is held by anybody.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from engine.errors import AdmissionRefusedError, StepFailedError
from engine.memory.window_blocks import WindowConfig, most_ahead_tokens, num_blocks_needed
from engine.request import EngineRequest, FinishReason
from tests.builders import make_config, make_request, make_tokens
from tests.fakes import Harness, expected_answer, make_harness

MAX_MODEL_LEN = 40
PROMPTS = tuple(make_tokens(length, seed) for seed in (1, 2) for length in (1, 4, 7, 8, 12, 21, 30))


@dataclass
class Walk:
    """A harness with the moves of a random walk, and what has to come of each request."""

    harness: Harness
    asked: dict[str, EngineRequest] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    waited_s: dict[str, float] = field(default_factory=dict)
    _open: dict[str, None] = field(default_factory=dict)

    @property
    def open_ids(self) -> list[str]:
        """Requests that were accepted and have not ended, in order of arrival."""
        return list(self._open)

    def add(self, request: EngineRequest) -> None:
        try:
            self.harness.add(request)
        except AdmissionRefusedError:
            return
        self.asked[request.request_id] = request
        self._open[request.request_id] = None

    def cancel(self, request_id: str) -> None:
        assert self.harness.cancel(request_id)
        assert not self.harness.cancel(request_id)
        self.cancelled.add(request_id)
        del self._open[request_id]

    def fail_next(self, request_ids: list[str]) -> None:
        """The step launched next fails: rows of these requests, or without any, all of it."""
        fault = {r: StepFailedError("row") for r in request_ids} if request_ids else StepFailedError("step")
        self.harness.runner.faults[len(self.harness.runner.batches)] = fault

    @property
    def concerned_by_faults(self) -> set[str]:
        """Requests with a row that failed."""
        concerned: set[str] = set()
        for batch in self.harness.runner.batches:
            fault = self.harness.runner.faults.get(batch.step_index)
            concerned |= {row.request_id for row in batch.rows} & (
                set(fault) if isinstance(fault, dict) else {row.request_id for row in batch.rows if fault}
            )
        return concerned

    def step(self) -> None:
        before_s = self.harness.clock.now_s
        batch = self.harness.step()
        rows = {row.request_id for row in batch.rows} if batch else set()
        for request_id in self.open_ids:
            outputs = self.harness.outputs[request_id]
            if outputs and outputs[-1].finish_reason is not None:
                del self._open[request_id]
            elif request_id not in rows:
                elapsed_s = self.harness.clock.now_s - before_s
                self.waited_s[request_id] = self.waited_s.get(request_id, 0.0) + elapsed_s
        self.harness.scheduler.check_invariants()

    def finish(self) -> None:
        self.harness.scheduler.hold_admissions(False)
        for _ in range(5000):
            if not self.harness.scheduler.has_unfinished:
                break
            self.step()
        self.harness.run()
        self.check_outcomes()
        self.check_nothing_is_held()

    def check_outcomes(self) -> None:
        failing = self.concerned_by_faults
        for request_id, request in self.asked.items():
            outputs = self.harness.outputs[request_id]
            answer = self.harness.answer(request_id)
            expected = expected_answer(request, max_model_len=MAX_MODEL_LEN, choose=self.harness.runner.choose)
            ended = [output for output in outputs if output.finish_reason is not None]
            if request_id in self.cancelled:
                assert not ended
                assert answer == expected[: len(answer)]
                continue
            assert len(ended) == 1, "every request ends once"
            assert ended[0] is outputs[-1]
            if ended[0].finish_reason is FinishReason.ERROR:
                assert request_id in failing or request.deadline_s is not None
                assert answer == expected[: len(answer)]
            else:
                assert answer == expected

    def check_nothing_is_held(self) -> None:
        scheduler = self.harness.scheduler
        stats = scheduler.stats(self.harness.clock.now_s)
        assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (0, 0, 0)
        assert stats.num_blocks_free + stats.num_blocks_cached == stats.num_blocks_total
        assert stats.num_finished + stats.num_failed + stats.num_cancelled == len(self.asked)
        assert scheduler.shrink_prefix_cache(0) == stats.num_blocks_cached
        assert scheduler.stats(0.0).num_blocks_free == stats.num_blocks_total
        scheduler.check_invariants()


def make_walk(
    steps_in_flight: int,
    num_blocks: int = 24,
    prefix_cache: str = "shared",
    *,
    checks: bool = True,
    slots: int = 3,
    num_state_snapshots: int | None = None,
    window_tokens: int | None = None,
) -> Walk:
    window = None
    if window_tokens is not None:
        ahead = most_ahead_tokens(12, slots, steps_in_flight)
        window = WindowConfig(window_tokens, num_blocks_needed(window_tokens, 4, slots, ahead) + 2)
    config = make_config(
        slots=slots,
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        max_chunk_tokens=12,
        prefix_cache=prefix_cache,
        max_waiting_requests=30,
        max_steps_in_flight=steps_in_flight,
        num_state_snapshots=num_state_snapshots,
        window=window,
    )
    return Walk(make_harness(config, checks=checks))


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis chooses the moves, and shortens those that break something."""

    def __init__(self) -> None:
        super().__init__()
        self.walk: Walk | None = None

    @precondition(lambda self: self.walk is None)
    @rule(
        steps_in_flight=st.integers(1, 2),
        num_blocks=st.sampled_from([10, 14, 24]),
        prefix_cache=st.sampled_from(["shared", "per-user", "off"]),
        num_state_snapshots=st.sampled_from([None, 0, 2, 9]),
    )
    def begin(self, steps_in_flight: int, num_blocks: int, prefix_cache: str, num_state_snapshots: int | None) -> None:
        self.walk = make_walk(steps_in_flight, num_blocks, prefix_cache, num_state_snapshots=num_state_snapshots)

    @precondition(lambda self: self.walk)
    @rule(
        prompt=st.sampled_from(PROMPTS),
        max_tokens=st.integers(1, 12),
        greedy=st.booleans(),
        user=st.sampled_from("ab"),
        priority=st.sampled_from([0, 0, 0, 1]),
        patience_s=st.sampled_from([None, None, None, 0.5]),
        number=st.integers(1, 3),
        fork=st.booleans(),
    )
    def add(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        greedy: bool,
        user: str,
        priority: int,
        patience_s: float | None,
        number: int,
        fork: bool,
    ) -> None:
        assert self.walk is not None
        first: str | None = None
        for seed in range(number):
            request = make_request(
                prompt,
                max_tokens=max_tokens + seed,
                temperature=0.0 if greedy else 1.0,
                seed=seed,
                user=user,
                priority=priority,
                deadline_s=None if patience_s is None else self.walk.harness.clock.now_s + patience_s,
                fork_of=first if fork else None,
                ignore_eos=False,
            )
            first = first or request.request_id
            self.walk.add(request)

    @precondition(lambda self: self.walk)
    @rule(number=st.integers(1, 4))
    def step(self, number: int) -> None:
        assert self.walk is not None
        for _ in range(number):
            self.walk.step()

    @precondition(lambda self: self.walk and self.walk.open_ids)
    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        assert self.walk is not None
        open_ids = self.walk.open_ids
        self.walk.cancel(open_ids[which % len(open_ids)])

    @precondition(lambda self: self.walk and self.walk.open_ids)
    @rule(which=st.integers(0, 9), whole_step=st.booleans())
    def fail(self, which: int, whole_step: bool) -> None:
        assert self.walk is not None
        open_ids = self.walk.open_ids
        self.walk.fail_next([] if whole_step else [open_ids[which % len(open_ids)]])

    @precondition(lambda self: self.walk)
    @rule(held=st.booleans(), num_kept=st.integers(0, 8), preempts=st.booleans())
    def guard_memory(self, held: bool, num_kept: int, preempts: bool) -> None:
        assert self.walk is not None
        scheduler = self.walk.harness.scheduler
        scheduler.hold_admissions(held)
        scheduler.shrink_prefix_cache(num_kept)
        if preempts:
            scheduler.preempt_one(self.walk.harness.clock.now_s)
        scheduler.check_invariants()

    def teardown(self) -> None:
        if self.walk is not None:
            self.walk.finish()


SchedulerMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
test_hypothesis_finds_nothing = SchedulerMachine.TestCase


def random_request(draw: random.Random, walk: Walk) -> EngineRequest:
    prompt = draw.choice(PROMPTS)
    open_ids = walk.open_ids
    parent = draw.choice(open_ids) if open_ids and draw.random() < 0.2 else None
    return make_request(
        walk.asked[parent].prompt_token_ids if parent else prompt,
        max_tokens=draw.randint(1, 14),
        temperature=draw.choice([0.0, 1.0]),
        seed=draw.randrange(5),
        user=draw.choice("abc"),
        priority=draw.choice([0, 0, 0, 0, 1]),
        fork_of=parent,
        ignore_eos=False,
    )


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("num_blocks", "num_state_snapshots", "window_tokens"),
    [
        (11, None, None),
        (24, None, None),
        (60, None, None),
        (14, 9, None),
        (60, 3, None),
        (60, 12, None),
        (24, None, 1),
        (60, None, 10),
        (60, 9, 7),
    ],
)
def test_long_random_walks(
    steps_in_flight: int, num_blocks: int, num_state_snapshots: int | None, window_tokens: int | None
) -> None:
    """Four thousand steps each with everything happening, with and without recurrent state and sliding windows."""
    draw = random.Random(num_blocks * 10 + steps_in_flight)
    prefix_cache = draw.choice(["shared", "per-user"])
    walk = make_walk(
        steps_in_flight,
        num_blocks,
        prefix_cache,
        slots=4,
        checks=False,
        num_state_snapshots=num_state_snapshots,
        window_tokens=window_tokens,
    )
    for _ in range(4000):
        chance = draw.random()
        if chance < 0.25:
            walk.add(random_request(draw, walk))
        elif chance < 0.27 and (open_ids := walk.open_ids):
            walk.cancel(draw.choice(open_ids))
        elif chance < 0.28:
            walk.harness.scheduler.preempt_one(walk.harness.clock.now_s)
        elif chance < 0.285:
            walk.harness.scheduler.shrink_prefix_cache(draw.randint(0, 5))
        walk.step()
    walk.finish()
    stats = walk.harness.scheduler.stats(0.0)
    assert stats.num_preemptions > 5
    assert stats.num_finished > 600


def test_a_thousand_disconnects_at_every_stage_leave_nothing() -> None:
    draw = random.Random(5)
    walk = make_walk(2, 24, slots=4, checks=False)
    leaving: dict[str, int] = {}
    num_left = 0
    while num_left < 1000:
        while len(walk.open_ids) < 8:
            request = random_request(draw, walk)
            walk.add(request)
            leaving[request.request_id] = draw.randint(0, 20)
        for request_id in walk.open_ids:
            leaving[request_id] -= 1
            if leaving[request_id] < 0:
                walk.cancel(request_id)
                num_left += 1
        walk.step()
    for request_id in walk.open_ids:
        walk.cancel(request_id)
    walk.finish()
    assert walk.harness.scheduler.stats(0.0).num_cancelled >= 1000


def test_waits_are_accounted_to_the_last_step() -> None:
    """With one step in flight at a time: a request waits in exactly the steps that hold no row of it."""
    draw = random.Random(3)
    walk = make_walk(1, 14, slots=3, checks=False)
    for _ in range(400):
        if draw.random() < 0.2:
            request = random_request(draw, walk)
            walk.add(make_request(request.prompt_token_ids, max_tokens=10, received_s=walk.harness.clock.now_s))
        if draw.random() < 0.02:
            walk.harness.scheduler.preempt_one(walk.harness.clock.now_s)
        walk.step()
    walk.finish()
    num_checked = 0
    for request_id in walk.asked:
        timeline = walk.harness.last(request_id).timeline
        assert timeline is not None
        assert sum(timeline.waited_s.values()) == pytest.approx(walk.waited_s.get(request_id, 0.0))
        num_checked += timeline.num_preemptions > 0
    assert num_checked > 3
