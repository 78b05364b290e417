"""The dashboard's picture: what is shown of replicas, slots, memory, the last hour, and of a Mac that is silent."""

from __future__ import annotations

import dataclasses
import json

import pytest

from engine.interfaces import RunningView, WaitingView
from serve_app.autoscaling.journal import NotedScaling, ScalingHistory
from serve_app.ingress.dashboard.state import Json, Seen, compose
from serve_app.ingress.observing import IngressView
from serve_app.protocol import ReplicaStatus
from serve_app.routing.decision import Candidate, Decision, Reason
from serve_app.telemetry.hour import LastHour
from serve_app.telemetry.observer import Failure, ReplicaView
from serve_app.telemetry.recorder import Tokens
from tests.telemetry_samples import make_record, make_status

NOW_S = 6000.0 * 60 + 30
READING = RunningView(0, "a", "anna", 100, 20, 60, 0, 1.0)
WRITING = RunningView(2, "b", "ben", 100, 0, 104, 5, 2.0)
RESUMING = RunningView(1, "c", "cleo", 100, 0, 50, 5, 2.0)
STALLED = RunningView(3, "d", "dora", 100, 0, 104, 5, 2.0, waits_for="blocks")
MEMORY = {
    "machine_bytes": 1000,
    "weights_bytes": 300,
    "kv_pool_bytes": 200,
    "kv_held_bytes": 120,
    "cached_prefix_bytes": 50,
    "headroom_bytes": 100,
    "foreign_bytes": None,
    "guard_stage": "holding",
    "guard_last_event": "pressure",
}


def view(name: str = "r1", host: str = "mac-1", **engine: object) -> ReplicaView:
    status = dataclasses.replace(make_status(), **engine)  # type: ignore[arg-type]
    hour = LastHour()
    hour.tokens(Tokens(600, [0.03] * 10, [(100, 60)]), NOW_S - 60)
    hour.finished(make_record(outcome="queue_full"), NOW_S)
    failures = (Failure(NOW_S, "x", "anna", "queue_full", "x queue_full"),)
    return ReplicaView(
        ReplicaStatus(name, f"node-{name}", host, "demo", True, 2, status), 20.0, hour.minutes(NOW_S), failures
    )


def picture(*seen: Seen, **more: object) -> Json:
    values: dict[str, object] = {"scaling": {}, "decisions": ()} | more
    found = compose(["demo"], seen, values["scaling"], values["decisions"], NOW_S)  # type: ignore[arg-type]
    json.dumps(found)
    return found


def test_every_slot_says_who_does_what() -> None:
    (mac,) = picture(Seen(view(running=(READING, RESUMING, WRITING, STALLED)), 0.0))["macs"]
    assert [slot and slot["phase"] for slot in mac["slots"]] == ["prefill", "prefill", "decode", "waiting"]
    assert mac["slots"][3]["waits_for"] == "blocks"
    (mac,) = picture(Seen(view(running=(WRITING,)), 0.0))["macs"]
    assert [slot is None for slot in mac["slots"]] == [True, True, False, True]


def test_replicas_add_up_and_a_silent_one_counts_no_more() -> None:
    waiting = (WaitingView("w", "wes", 50, 3.0, "slots"),)
    both = picture(Seen(view("r1", "mac-1", waiting=waiting), 0.0), Seen(view("r2", "mac-2"), 4.5))
    assert both["now"]["macs"] == 2
    assert both["now"]["macs_ready"] == 1
    assert (both["now"]["tokens_per_s"], both["now"]["slots"], both["now"]["waiting"]) == (20.0, 4, 1)
    assert [(mac["host"], mac["answers"], mac["silent_s"]) for mac in both["macs"]] == [
        ("mac-1", True, 0.0),
        ("mac-2", False, 4.5),
    ]
    (waits,) = both["waiting"]
    assert (waits["user"], waits["waits_for"], waits["host"]) == ("wes", "slots", "mac-1")


def test_the_wait_of_a_newcomer_is_that_of_the_best_mac() -> None:
    free = dataclasses.replace(make_status().scheduler, num_waiting=0)
    assert picture(Seen(view(), 0.0))["now"]["predicted_wait_s"] == 1.5
    assert picture(Seen(view(), 0.0), Seen(view("r2", scheduler=free), 0.0))["now"]["predicted_wait_s"] == 0.0
    unknown = dataclasses.replace(make_status().scheduler, predicted_wait_s=None)
    assert picture(Seen(view(scheduler=unknown), 0.0))["now"]["predicted_wait_s"] is None


def test_memory_is_a_stack_of_what_is_known() -> None:
    (mac,) = picture(Seen(view(memory=MEMORY), 0.0))["macs"]
    sizes = {part["name"]: part["bytes"] for part in mac["memory"]["segments"]}
    assert sizes == {"weights": 300, "kv_held": 120, "cached_prefix": 50, "kv_free": 30, "headroom": 100}
    assert mac["memory"]["guard_stage"] == "holding"
    assert picture(Seen(view(memory={}), 0.0))["macs"][0]["memory"] is None


def test_the_hour_has_sixty_minutes_and_their_sum() -> None:
    hour = picture(Seen(view("r1"), 0.0), Seen(view("r2"), 0.0))["hour"]
    assert len(hour["minutes"]) == 60
    assert (hour["output_tokens"], hour["minutes"][-2]["output_tokens"]) == (1200, 1200)
    assert (hour["calls"], hour["failed"], hour["minutes"][-1]["failed"]) == (2, 2, 2)
    assert hour["gap_s"]["p50"] == pytest.approx(0.03, rel=0.05)
    assert hour["minutes"][0]["gap_s"]["p50"] is None
    assert hour["elapsed_in_last_s"] == 30.0


def test_decisions_and_failures_are_told_newest_first() -> None:
    chosen = Candidate("r1", 1.0, 0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 64)
    decision = Decision("a", Reason.CACHED, chosen, (dataclasses.replace(chosen, replica="gone"),), (), 100, 2, 5.0)
    scaling = {"demo": ScalingHistory(1, 0, (NotedScaling(1.0, 1, 2, "1 -> 2: work"),))}
    found = picture(Seen(view(), 0.0), scaling=scaling, decisions=(decision,))
    (routed,) = found["routing"]
    assert (routed["host"], routed["reason"], routed["next"]["host"]) == ("mac-1", "cached", "gone")
    (scaled,) = found["scaling"]
    assert (scaled["model"], scaled["num_before"], scaled["num_after"], scaled["reason"]) == (
        "demo",
        1,
        2,
        "1 -> 2: work",
    )
    assert [(failure["code"], failure["host"]) for failure in found["failures"]] == [("queue_full", "mac-1")]


def test_a_failure_that_ingress_and_replica_have_seen_is_one() -> None:
    lost, known = (
        Failure(NOW_S + 1, "y", "", "replica_lost", "Gone."),
        Failure(NOW_S, "x", "anna", "queue_full", "Full."),
    )
    found = compose(["demo"], [Seen(view(), 0.0)], {}, (), NOW_S, [IngressView((lost,)), IngressView((known,))])
    failures = [(failure["request_id"], failure["host"]) for failure in found["failures"]]
    assert failures == [("y", None), ("x", "mac-1")]


def test_a_fleet_without_replicas_is_a_picture_too() -> None:
    empty = picture()
    assert (empty["macs"], empty["now"]["slots"], empty["hour"]["calls"]) == ([], 0, 0)
    (mac,) = picture(Seen(ReplicaView(ReplicaStatus("r", "n", "mac-1", "demo", False, 0)), 0.0))["macs"]
    assert (mac["state"], mac["slots"], mac["predicted_wait_s"]) == ("unknown", [], None)


def test_a_history_keeps_its_counts_and_its_newest() -> None:
    history = ScalingHistory()
    for number in range(30):
        history = history.plus(NotedScaling(number, 2, 3 if number % 3 else 1, "why"))
    assert (history.num_up, history.num_down, len(history.newest)) == (20, 10, 20)
    assert history.newest[-1].at_unix_s == 29
