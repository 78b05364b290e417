"""The scaling rule on a virtual clock."""

from __future__ import annotations

import ast
import pickle
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.autoscaling import serve_policy
from serve_app.autoscaling.policy import FleetLoad, ScalingDecision, ScalingMemory, ScalingRules, decide
from serve_app.autoscaling.serve_policy import MEMORY, REASON, ServeScaling

RULES = ScalingRules(min_replicas=1, max_replicas=3, up_after_s=2.0, down_after_s=60.0)


@dataclass
class Fleet:
    """Replicas that take ``load_s`` to start, and a record of what was decided."""

    rules: ScalingRules = RULES
    load_s: float = 30.0
    now_s: float = 0.0
    wanted: int = 1
    memory: ScalingMemory = field(default_factory=ScalingMemory)
    starts_s: list[float] = field(default_factory=lambda: [-1e9])
    history: list[tuple[float, int]] = field(default_factory=list)

    @property
    def num_ready(self) -> int:
        return sum(start_s + self.load_s <= self.now_s for start_s in self.starts_s)

    def run(self, num_requests: float, duration_s: float, step_s: float = 0.5) -> ScalingDecision:
        end_s = self.now_s + duration_s
        while self.now_s < end_s:
            self.now_s += step_s
            load = FleetLoad(self.num_ready, self.wanted, slots=4, num_running=num_requests)
            decision = decide(self.rules, load, self.memory, self.now_s)
            self.memory = decision.memory
            if decision.num_replicas != self.wanted:
                self.wanted = decision.num_replicas
                self.history.append((self.now_s, self.wanted))
            self.starts_s = (self.starts_s + [self.now_s] * self.wanted)[: self.wanted]
        return decision


def test_a_step_of_load_goes_up_once_within_seconds_and_down_once_after_minutes() -> None:
    fleet = Fleet()
    fleet.run(2, 100)
    assert fleet.history == []
    fleet.run(12, 200)
    assert [wanted for _, wanted in fleet.history] == [3]
    assert fleet.history[0][0] == pytest.approx(102.5, abs=0.5)
    fleet.run(0, 200)
    assert [wanted for _, wanted in fleet.history] == [3, 1]
    assert fleet.history[1][0] == pytest.approx(360.5, abs=0.5)


def test_a_spike_shorter_than_the_delay_changes_nothing() -> None:
    fleet = Fleet()
    for _ in range(20):
        fleet.run(12, 1.0)
        fleet.run(1, 5.0)
    assert fleet.history == []


def test_a_load_that_comes_and_goes_keeps_its_replicas() -> None:
    fleet = Fleet()
    for _ in range(10):
        fleet.run(9, 20.0)
        fleet.run(0, 40.0)
    assert [wanted for _, wanted in fleet.history] == [3]


def test_down_goes_to_the_most_that_was_needed_meanwhile() -> None:
    fleet = Fleet()
    fleet.run(12, 60.0)
    fleet.run(0, 30.0)
    fleet.run(5, 1.0)
    decision = fleet.run(0, 30.0)
    assert [wanted for _, wanted in fleet.history] == [3, 2]
    assert fleet.wanted == 2
    assert decision.num_replicas == 2


def test_while_replicas_load_only_work_that_fills_even_them_asks_for_more() -> None:
    rules = replace(RULES, max_replicas=5)
    fleet = Fleet(rules)
    fleet.run(6, 10.0)
    assert fleet.wanted == 2
    held = fleet.run(8, 10.0)
    assert fleet.wanted == 2
    assert "held, 1 of 2 replicas still load" in held.reason
    fleet.run(15, 10.0)
    assert fleet.wanted == 5
    fleet.run(15, 100.0)
    assert [wanted for _, wanted in fleet.history] == [2, 5]


def test_a_replica_that_never_starts_does_not_keep_the_number_up() -> None:
    fleet = Fleet(load_s=1e9)
    fleet.run(12, 10.0)
    fleet.run(0, 100.0)
    assert fleet.wanted == 1


@pytest.mark.parametrize(("num_requests", "expected"), [(0, 1), (3, 2), (3.1, 3), (100, 3)])
def test_a_warm_spare_is_kept_within_the_limits(num_requests: float, expected: int) -> None:
    fleet = Fleet(replace(RULES, num_spare=1))
    fleet.run(num_requests, 100.0)
    assert fleet.wanted == expected


def test_a_replica_that_drains_is_replaced_within_the_limits() -> None:
    load = FleetLoad(1, 1, slots=4, num_running=2, num_draining=1)
    decision = decide(RULES, load, ScalingMemory(above_since_s=0.0), 5.0)
    assert decision.num_replicas == 2
    assert decision.reason.endswith(", 1 draining")
    assert decide(replace(RULES, max_replicas=1), load, ScalingMemory(), 5.0).num_replicas == 1


def test_limits_that_change_are_kept_at_once() -> None:
    up = decide(replace(RULES, min_replicas=2), FleetLoad(1, 1, 4), ScalingMemory(), 0.0)
    assert up.num_replicas == 2
    assert "at least 2" in up.reason
    down = decide(RULES, FleetLoad(5, 5, 4), ScalingMemory(), 0.0)
    assert down.num_replicas == 3
    assert "at most 3" in down.reason


def test_every_decision_says_why() -> None:
    load = FleetLoad(1, 1, slots=4, num_running=4, num_waiting=3, num_in_routers=2)
    decision = decide(RULES, load, ScalingMemory(above_since_s=0.0), 5.0)
    assert decision.reason == "1 -> 3: 4 running + 3 waiting + 2 in routers on 4 slots each at 75%"


@settings(max_examples=40)
@given(
    loads=st.lists(st.tuples(st.integers(0, 40), st.floats(0.5, 90.0)), max_size=12),
    spare=st.integers(0, 2),
    minimum=st.integers(0, 2),
)
def test_limits_always_hold_and_a_steady_load_settles(loads: list[tuple[int, float]], spare: int, minimum: int) -> None:
    fleet = Fleet(ScalingRules(minimum, 4, spare, up_after_s=2.0, down_after_s=60.0))
    for num_requests, duration_s in loads:
        fleet.run(num_requests, duration_s, step_s=2.0)
        assert minimum <= fleet.wanted <= 4
    fleet.run(5, 300.0, step_s=2.0)
    settled = len(fleet.history)
    fleet.run(5, 300.0, step_s=2.0)
    assert len(fleet.history) == settled
    assert fleet.wanted == min(4, max(minimum, 2 + spare))


@dataclass
class Context:
    """What Serve gives, as far as it is read."""

    current_num_replicas: int = 1
    target_num_replicas: int = 1
    total_queued_requests: float | None = None
    aggregated_metrics: dict[str, dict[str, float]] | None = None
    policy_state: dict[str, Any] = field(default_factory=dict)
    current_time: float = 0.0
    deployment_name: str = "MetalReplica-demo"


def test_serves_context_is_read_and_the_memory_comes_back() -> None:
    policy = ServeScaling({"max_replicas": 4, "up_after_s": 1.0}, slots=2)
    metrics = {"slots": {"a": 8.0, "b": 4.0}, "running": {"a": 8.0, "b": 4.0}, "waiting": {"a": 3.0, "b": 0.0}}
    metrics["draining"] = {"a": 0.0, "b": 0.0}
    context = Context(2, 2, 1.0, metrics)
    number, state = policy(context)
    assert number == 2
    context = replace(context, policy_state=state, current_time=1.5)
    number, state = policy(context)
    assert number == 4
    assert state[REASON] == "2 -> 4: 12 running + 3 waiting + 1 in routers on 6 slots each at 75%"
    assert isinstance(state[MEMORY], ScalingMemory)


def test_before_any_replica_has_reported_the_configured_slots_count() -> None:
    policy = ServeScaling({"max_replicas": 4, "up_after_s": 0.0}, slots=2)
    assert policy(Context(total_queued_requests=3.0))[0] == 2


def test_the_adapter_is_small_and_can_be_pickled() -> None:
    pickle.loads(pickle.dumps(ServeScaling({"max_replicas": 2}, slots=4)))
    source = Path(serve_policy.__file__).read_text()
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    ours = {"serve_app.autoscaling", "serve_app.autoscaling.policy"}
    assert imported <= {"__future__", "collections.abc", "typing"} | ours
