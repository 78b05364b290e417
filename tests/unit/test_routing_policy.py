"""The choice of a replica: what it costs, what is excluded, and what many choices in a row add up to."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from serve_app.protocol import PrefixChain
from serve_app.routing.cost import SILENT_AFTER_S, Load, costs_of
from serve_app.routing.decision import Decision, DecisionLog, Reason
from serve_app.routing.policy import NUM_CANDIDATES, NUM_RANKED, SUSPECT_FOR_S, RoutingPolicy, RoutingRequest
from serve_app.routing.report import ReplicaReport, tag_of

HEAD, TALK = 11, 22
PROMPT = PrefixChain((HEAD, TALK, 33), (1000, 5000, 6000), TALK, 6000)
IDLE = ReplicaReport(1, slots=4, prefill_tokens_per_s=1000.0, answer_s=5.0)


def report(sequence: int = 1, **figures: Any) -> ReplicaReport:
    values = {"slots": 4, "prefill_tokens_per_s": 1000.0, "answer_s": 5.0, **figures}
    return ReplicaReport(sequence=sequence, **values)


def fleet(*reports: ReplicaReport | None) -> RoutingPolicy:
    policy = RoutingPolicy()
    for number, said in enumerate(reports):
        policy.report(f"r{number}", f"node{number}", said, 0.0)
    return policy


def choose(policy: RoutingPolicy, prefix: PrefixChain = PROMPT, request_id: str = "q", now_s: float = 0.0) -> Decision:
    decision = policy.choose(RoutingRequest(request_id, prefix, prefix.conversation), now_s)
    assert decision is not None
    return decision


def cold(number: int) -> PrefixChain:
    """A prompt that nobody knows."""
    name = random.Random(number).getrandbits(63)
    return PrefixChain((name,), (6000,), name, 6000)


def test_the_terms_of_the_cost() -> None:
    columns = {
        "slots": np.array([4.0, 4.0]),
        "num_requests": np.array([1.0, 6.0]),
        "num_unread_tokens": np.array([0.0, 2000.0]),
        "prefill_tokens_per_s": np.array([1000.0, 500.0]),
        "alone_s": np.array([5.0, 6.5]),
        "row_s": np.array([0.0, 0.5]),
        "age_s": np.array([0.0, SILENT_AFTER_S + 1.0]),
    }
    costs = costs_of(Load(**columns), 6000, np.array([0.0, 5000.0]))
    assert costs.wait_s.tolist() == [0.0, 3 * 8.0 / 4], "six there, four slots: the third departure frees one"
    assert costs.turn_s.tolist() == [0.0, 4.0]
    assert costs.reread_s.tolist() == [6.0, 2.0]
    assert costs.answer_s.tolist() == [5.0, 8.0]
    assert costs.disturbance_s.tolist() == [6.0, 12.0]
    assert costs.silence_s.tolist() == [0.0, 2.0]
    assert costs.total_s.tolist() == [17.0, 34.0]


def test_a_conversation_returns_to_where_it_is_cached() -> None:
    policy = fleet(IDLE, report(num_running=1, prefixes=frozenset({HEAD, TALK})), report(prefixes=frozenset({HEAD})))
    decision = choose(policy)
    assert decision.chosen.replica == "r1"
    assert decision.reason is Reason.CACHED
    assert decision.chosen.num_cached_tokens == 5000
    assert decision.order == ("r1", "r2", "r0"), "a head in common is worth its reading"


def test_it_leaves_when_waiting_there_costs_more_than_reading_again() -> None:
    full = report(num_running=4, num_waiting=6, prefixes=frozenset({HEAD, TALK}))
    decision = choose(fleet(IDLE, full))
    assert decision.chosen.replica == "r0"
    assert decision.reason is Reason.MOVED
    assert decision.alternatives[0].num_cached_tokens == 5000
    assert decision.alternatives[0].wait_s == pytest.approx(7 * 5.0 / 4)
    assert "r0 (moved)" in decision.sentence()
    assert "next r1" in decision.sentence()


def test_of_two_that_cost_the_same_the_one_with_the_cache() -> None:
    slower = report(num_running=2, answer_s=8.5, prefixes=frozenset({HEAD, TALK}))
    policy = fleet(report(answer_s=5.0), slower)
    assert choose(policy).chosen.replica == "r1"


def test_faster_machines_are_preferred_and_slow_ones_used_when_those_are_full() -> None:
    fast, slow = report(slots=8, answer_s=4.0), report(slots=2, answer_s=15.0, prefill_tokens_per_s=300.0)
    assert choose(fleet(slow, fast), cold(1)).chosen.replica == "r1"
    full = report(slots=8, answer_s=20.0, num_running=8, num_waiting=30)
    assert choose(fleet(slow, full), cold(1)).chosen.replica == "r0"


def test_a_cold_conversation_goes_to_the_same_node_from_every_router_and_after_a_restart() -> None:
    for number in range(20):
        first = choose(fleet(IDLE, IDLE, IDLE), cold(number))
        assert first.reason is Reason.COLD
        other = RoutingPolicy()
        for replica, node in (("new-a", "node2"), ("new-b", "node0"), ("new-c", "node1")):
            other.report(replica, node, IDLE, 0.0)
        nodes = {"new-a": "r2", "new-b": "r0", "new-c": "r1"}
        assert nodes[choose(other, cold(number)).chosen.replica] == first.chosen.replica


def test_a_node_that_leaves_moves_only_its_own_conversations() -> None:
    whole, smaller = fleet(*[IDLE] * 5), fleet(*[IDLE] * 5)
    smaller.remove("r3")
    for number in range(50):
        request_id = f"q{number}"
        before = choose(whole, cold(number), request_id).chosen.replica
        after = choose(smaller, cold(number), request_id).chosen.replica
        whole.came_back(request_id, before)
        smaller.came_back(request_id, after)
        assert before in (after, "r3")


def test_draining_and_unready_replicas_come_last() -> None:
    warm = frozenset({HEAD, TALK})
    draining, unready = report(draining=True, prefixes=warm), report(ready=False, prefixes=warm)
    decision = choose(fleet(draining, unready, report(num_running=4, num_waiting=50)))
    assert decision.chosen.replica == "r2"
    assert decision.reason is Reason.ONLY
    assert decision.num_usable == 1
    assert choose(fleet(draining, unready)).reason is Reason.LAST_RESORT


def test_a_silent_replica_loses_its_advantage_with_time() -> None:
    policy = fleet(report(prefixes=frozenset({HEAD, TALK})), IDLE)
    for now_s, expected in ((SILENT_AFTER_S, "r0"), (SILENT_AFTER_S + 60, "r1")):
        policy.report("r1", "node1", report(int(now_s) + 1), now_s)
        decision = choose(policy, request_id=f"q{now_s}", now_s=now_s)
        assert decision.chosen.replica == expected
        policy.came_back(f"q{now_s}", expected)


def test_an_unreachable_replica_is_left_alone_for_a_while_and_taken_when_nothing_else_is_left() -> None:
    policy = fleet(report(prefixes=frozenset({HEAD, TALK})), IDLE)
    policy.suspect("r0", 0.0)
    policy.suspect("unknown", 0.0)
    assert choose(policy, request_id="a").chosen.replica == "r1"
    assert choose(policy, request_id="b", now_s=SUSPECT_FOR_S + 0.1).chosen.replica == "r0"
    policy.remove("r1")
    policy.suspect("r0", 20.0)
    assert choose(policy, request_id="c", now_s=20.0).reason is Reason.LAST_RESORT


def test_speeds_that_are_not_measured_yet_are_those_of_the_others_from_the_moment_that_these_are_known() -> None:
    unmeasured = report(prefill_tokens_per_s=None, answer_s=None)
    policy = fleet(unmeasured, unmeasured)
    policy.report("r1", "node1", report(sequence=2, prefill_tokens_per_s=3000.0, answer_s=2.0), 1.0)
    decision = choose(policy, now_s=1.0)
    assert {candidate.answer_s for candidate in (decision.chosen, *decision.alternatives)} == {2.0}
    assert {candidate.reread_s for candidate in (decision.chosen, *decision.alternatives)} == {2.0}


def test_a_replica_without_figures_answers_as_fast_as_a_measured_one_that_nobody_uses() -> None:
    policy = fleet(report(num_running=2, answer_s=8.0, answer_row_s=1.5), report(answer_s=None))
    decision = choose(policy, cold(1))
    assert decision.chosen.replica == "r1"
    assert decision.chosen.answer_s == pytest.approx(5.0)
    assert decision.alternatives[0].answer_s == pytest.approx(8.0)


def test_a_replica_is_not_slow_for_the_long_answers_that_it_has_given() -> None:
    short, long = (report(answer_s=0.05 * tokens, answer_tokens=tokens) for tokens in (40.0, 200.0))
    decision = choose(fleet(replace(short, num_running=1), long), cold(1))
    assert decision.chosen.replica == "r1"
    assert decision.chosen.answer_s == pytest.approx(decision.alternatives[0].answer_s)


def test_calls_of_one_moment_are_spread_before_anybody_reports_again() -> None:
    idle = report(answer_row_s=1.5)
    for number in range(20):
        policy = fleet(idle, idle)
        name = random.Random(number).getrandbits(63)
        prefix = PrefixChain((name,), (60,), name, 60)
        chosen = [choose(policy, prefix, str(call)).chosen.replica for call in range(4)]
        assert sorted(chosen) == ["r0", "r0", "r1", "r1"]


def test_a_replica_that_has_not_reported_yet_counts_as_the_others() -> None:
    policy = fleet(IDLE, None)
    chosen = [choose(policy, cold(number), str(number)).chosen.replica for number in range(8)]
    assert chosen.count("r1") == 4, "as many slots as the one that is known"


def test_the_same_report_again_is_silence() -> None:
    policy = fleet(IDLE, IDLE)
    policy.report("r0", "node0", IDLE, 30.0)
    policy.report("r1", "node1", report(2), 30.0)
    assert choose(policy, now_s=30.0).chosen.replica == "r1"


def test_a_request_that_comes_back_unanswered_goes_to_another() -> None:
    policy = fleet(IDLE, IDLE, IDLE)
    tried: list[str] = []
    for _ in range(3):
        chosen = choose(policy).chosen.replica
        policy.taken("q", chosen, 0.0)
        policy.came_back("q", chosen)
        tried.append(chosen)
    assert sorted(tried) == ["r0", "r1", "r2"]
    assert choose(policy).reason is Reason.LAST_RESORT


def test_being_asked_again_before_anything_was_sent_is_no_failure() -> None:
    policy = fleet(IDLE, IDLE)
    assert choose(policy).chosen.replica == choose(policy).chosen.replica == choose(policy).chosen.replica


def test_the_replica_that_took_it_counts_not_the_one_that_was_chosen() -> None:
    policy = fleet(IDLE, IDLE)
    chosen = choose(policy).chosen.replica
    other = "r1" if chosen == "r0" else "r0"
    policy.taken("q", other, 0.0)
    assert policy.open_at(other) == ("q",)
    assert policy.open_at(chosen) == ()
    policy.came_back("q", other)
    assert choose(policy).chosen.replica == chosen


def test_without_replicas_there_is_no_choice() -> None:
    policy = fleet(IDLE)
    policy.remove("r0")
    policy.remove("r0")
    assert policy.choose(RoutingRequest("q", PROMPT, 1), 0.0) is None
    assert policy.replicas == ()


def test_prompts_of_two_users_do_not_share_where_caches_are_per_user() -> None:
    policy = fleet(IDLE, IDLE)
    first = policy.choose(RoutingRequest("a", PROMPT, TALK, salt="anna"), 0.0)
    second = policy.choose(RoutingRequest("b", PROMPT, TALK, salt="ben"), 0.0)
    assert first is not None
    assert second is not None
    assert second.chosen.num_cached_tokens == 0
    again = policy.choose(RoutingRequest("c", PROMPT, TALK, salt="anna"), 0.0)
    assert again is not None
    assert max(c.num_cached_tokens for c in (again.chosen, *again.alternatives)) == 6000


def test_a_burst_spreads_before_any_report_comes() -> None:
    policy = fleet(*[IDLE] * 4)
    counts = Counter(choose(policy, cold(number), f"q{number}").chosen.replica for number in range(16))
    assert set(counts.values()) == {4}


def test_a_popular_prompt_does_not_pile_up() -> None:
    policy = fleet(report(prefixes=frozenset(PROMPT.hashes)), *[IDLE] * 3)
    counts = Counter(choose(policy, PROMPT, f"q{number}").chosen.replica for number in range(40))
    assert counts["r0"] >= 10, "it is cached there"
    assert max(counts.values()) <= 16


def test_reports_of_our_own_requests_do_not_count_twice() -> None:
    policy = fleet(IDLE, IDLE)
    for number in range(4):
        policy.taken(f"q{number}", "r0", 0.0)
    tags = frozenset(tag_of(f"q{number}") for number in range(4))
    policy.report("r0", "node0", report(2, num_running=4, open_tags=tags), 1.0)
    decision = choose(policy, cold(1))
    waits = {c.replica: c.wait_s for c in (decision.chosen, *decision.alternatives)}
    assert waits == {"r0": 5.0 / 4, "r1": 0.0}


def test_a_large_fleet_gives_each_key_its_own_candidates() -> None:
    policy = fleet(*[IDLE] * 60)
    counts = Counter(choose(policy, cold(number), f"q{number}").chosen.replica for number in range(600))
    assert max(counts.values()) <= 13
    busy = fleet(*[report(num_running=4, num_waiting=100)] * 59, IDLE)
    decision = choose(busy, cold(1))
    assert decision.chosen.replica == "r59", "the candidates of a key are a preference, not a prison"
    assert len(decision.order) == NUM_RANKED
    assert NUM_CANDIDATES < NUM_RANKED < 60


def test_rows_are_used_again() -> None:
    policy = fleet(*[report(prefixes=frozenset({HEAD}))] * 30)
    for number in range(29):
        policy.remove(f"r{number}")
    for number in range(30, 45):
        policy.report(f"r{number}", f"node{number}", IDLE, 0.0)
    decision = choose(policy)
    assert set(decision.order) == {f"r{number}" for number in range(29, 45)}
    assert decision.chosen.replica == "r29"


def test_a_decision_is_cheap() -> None:
    """At a hundred replicas 200 us are asked for; the limit here is wide, for a machine that is busy."""
    policy = fleet(*[report(num_running=number % 4, prefixes=frozenset({HEAD, number})) for number in range(100)])
    best_s = float("inf")
    for number in range(200):
        before_s = time.process_time()
        chosen = choose(policy, request_id=f"q{number}").chosen.replica
        best_s = min(best_s, time.process_time() - before_s)
        policy.came_back(f"q{number}", chosen)
    assert best_s < 1e-3


def test_the_log_keeps_the_newest_decisions() -> None:
    policy, log = fleet(IDLE, IDLE), DecisionLog(num_kept=2)
    for request_id in ("a", "b", "c"):
        log.add(choose(policy, request_id=request_id))
    assert log.get("a") is None
    assert [decision.request_id for decision in log.newest(5)] == ["c", "b"]
    log.add(choose(policy, request_id="b"))
    assert [decision.request_id for decision in log.newest(1)] == ["b"]
