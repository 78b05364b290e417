"""Everything that the dashboard shows, as one plain value. Pure.

Owns: what is shown, and how the views of many replicas become one picture. Must not know: how views are gathered, how
the picture is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.interfaces import EngineStatus, RunningView, SchedulerStats
from serve_app.autoscaling.journal import ScalingHistory
from serve_app.ingress.observing import IngressView
from serve_app.routing.decision import Decision
from serve_app.telemetry.hour import NUM_MINUTES, Minute, added, percentile_s
from serve_app.telemetry.observer import ReplicaView

Json = dict[str, Any]
NUM_WAITING_SHOWN = 50
NUM_DECISIONS_SHOWN = 8
NUM_FAILURES_SHOWN = 12
_MINUTE_S = 60
# Terms of the ledger in the order of their stacking, each with the kind that gives it its colour.
MEMORY_SEGMENTS = (
    ("foreign", "other programs", "foreign"),
    ("weights", "weights", "permanent"),
    ("runtime", "runtime", "permanent"),
    ("activations", "activations", "permanent"),
    ("mlx_cache_limit", "buffer cache", "permanent"),
    ("state", "state", "request"),
    ("sampler", "sampler", "request"),
    ("kv_held", "KV in use", "request"),
    ("cached_prefix", "cached prompts", "cached"),
    ("kv_free", "KV free", "free"),
    ("headroom", "headroom", "headroom"),
    ("unassigned", "unassigned", "free"),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """A replica's newest view, and how many seconds ago it was given."""

    view: ReplicaView
    age_s: float


def compose(
    models: Sequence[str],
    seen: Sequence[Seen],
    scaling: Mapping[str, ScalingHistory],
    decisions: Sequence[Decision],
    now_unix_s: float,
    ingresses: Sequence[IngressView] = (),
) -> Json:
    """Return the picture. ``ingresses``: what they have seen fail; of some of it no replica knows."""
    macs = [_mac(each) for each in sorted(seen, key=lambda each: (each.view.status.host, each.view.status.replica_id))]
    hosts = {each.view.status.replica_id: each.view.status.host for each in seen}
    return {
        "at_unix_s": now_unix_s,
        "models": list(models),
        "now": _now(macs),
        "hour": _hour([each.view for each in seen], ingresses, now_unix_s),
        "macs": macs,
        "waiting": [waiting | {"host": mac["host"]} for mac in macs for waiting in mac["waiting"]][:NUM_WAITING_SHOWN],
        "routing": [_decision(decision, hosts) for decision in decisions[:NUM_DECISIONS_SHOWN]],
        "scaling": _scaling(scaling),
        "failures": _failures([each.view for each in seen], ingresses),
    }


def _now(macs: Sequence[Json]) -> Json:
    answering = [mac for mac in macs if mac["answers"]]
    waits = [mac["predicted_wait_s"] for mac in answering if mac["ready"] and mac["predicted_wait_s"] is not None]
    return {
        "tokens_per_s": sum(mac["tokens_per_s"] for mac in answering),
        "running": sum(mac["running"] for mac in answering),
        "slots": sum(len(mac["slots"]) for mac in answering),
        "waiting": sum(mac["num_waiting"] for mac in answering),
        # A newcomer goes where it waits least.
        "predicted_wait_s": min(waits) if waits else None,
        "macs": len(macs),
        "macs_ready": sum(mac["ready"] for mac in answering),
    }


def _mac(seen: Seen) -> Json:
    view, status = seen.view, seen.view.status
    engine = status.engine
    stats = engine.scheduler if engine else None
    return {
        "replica": status.replica_id,
        # Of one that has never answered no more is known than where it is.
        "host": status.host or status.node_id[:8],
        "model": status.model,
        "answers": seen.age_s == 0,
        "silent_s": seen.age_s,
        "state": engine.state if engine else "unknown",
        "ready": status.ready,
        "draining": status.draining,
        "device": engine.model.device if engine else None,
        "open_calls": status.num_open_calls,
        "restarts": engine.num_restarts if engine else 0,
        "last_failure": engine.last_failure if engine else None,
        "tokens_per_s": view.tokens_per_s,
        "slots": _slots(engine) if engine else [],
        "running": stats.num_running if stats else 0,
        "num_waiting": stats.num_waiting if stats else 0,
        "waiting_on": dict(stats.waiting_on) if stats else {},
        "waiting": [asdict(waiting) for waiting in engine.waiting] if engine else [],
        "predicted_wait_s": _predicted_wait_s(stats),
        "memory": _memory(engine) if engine else None,
    }


def _predicted_wait_s(stats: SchedulerStats | None) -> float | None:
    """None before the first answer has shown how fast the engine is; with a free slot nobody waits."""
    if stats is None:
        return None
    return 0.0 if stats.num_running < stats.slots and not stats.num_waiting else stats.predicted_wait_s


def _slots(engine: EngineStatus) -> list[Json | None]:
    """Every slot, free ones as None."""
    slots: list[Json | None] = [None] * engine.scheduler.slots
    for running in engine.running:
        slots[running.slot] = _running(running)
    return slots


def _running(running: RunningView) -> Json:
    num_known = running.num_prompt_tokens + running.num_output_tokens
    phase = "prefill"
    if running.waits_for is not None:
        phase = "waiting"
    elif running.num_output_tokens and running.num_computed_tokens >= num_known - 1:
        phase = "decode"
    return asdict(running) | {"phase": phase}


def _memory(engine: EngineStatus) -> Json | None:
    """The ledger as segments of the machine's memory; None where the engine keeps none."""
    facts = engine.memory
    machine_bytes = facts.get("machine_bytes")
    if not isinstance(machine_bytes, int | float):
        return None

    def term(name: str) -> float:
        value = facts.get(f"{name}_bytes")
        return float(value) if isinstance(value, int | float) else 0.0

    sizes = {name: term(name) for name, _, _ in MEMORY_SEGMENTS}
    sizes["kv_free"] = max(0.0, term("kv_pool") - sizes["kv_held"] - sizes["cached_prefix"])
    segments = [
        {"name": name, "label": label, "kind": kind, "bytes": sizes[name]}
        for name, label, kind in MEMORY_SEGMENTS
        if sizes[name] > 0
    ]
    return {
        "machine_bytes": machine_bytes,
        "segments": segments,
        "headroom_bytes": facts.get("headroom_bytes"),
        "available_bytes": facts.get("available_bytes"),
        "used_bytes": facts.get("used_bytes"),
        "pressure": facts.get("pressure"),
        "guard_stage": facts.get("guard_stage"),
        "guard_last_event": facts.get("guard_last_event"),
    }


def _hour(views: Sequence[ReplicaView], ingresses: Sequence[IngressView], now_unix_s: float) -> Json:
    of_all = (*(view.minutes for view in views), *(ingress.minutes for ingress in ingresses))
    minutes = [minute for minutes in of_all for minute in minutes]
    now_minute = int(now_unix_s // _MINUTE_S)
    by_number: dict[int, list[Minute]] = {}
    for minute in minutes:
        by_number.setdefault(minute.number, []).append(minute)
    first = now_minute - NUM_MINUTES + 1
    return _totals(minutes) | {
        "minutes": [_totals(by_number.get(number, ())) for number in range(first, now_minute + 1)],
        "elapsed_in_last_s": now_unix_s - now_minute * _MINUTE_S,
    }


def _totals(minutes: Sequence[Minute]) -> Json:
    ttft, gap = added(minute.ttft for minute in minutes), added(minute.gap for minute in minutes)
    queue = added(minute.queue for minute in minutes)
    return {
        "calls": sum(minute.num_calls for minute in minutes),
        "failed": sum(minute.num_failed for minute in minutes),
        "cancelled": sum(minute.num_cancelled for minute in minutes),
        "prompt_tokens": sum(minute.num_prompt_tokens for minute in minutes),
        "cached_tokens": sum(minute.num_cached_tokens for minute in minutes),
        "output_tokens": sum(minute.num_output_tokens for minute in minutes),
        "preemptions": sum(minute.num_preemptions for minute in minutes),
        "ttft_s": {"p50": percentile_s(ttft, 50), "p95": percentile_s(ttft, 95)},
        "gap_s": {"p50": percentile_s(gap, 50), "p95": percentile_s(gap, 95)},
        "queue_s": {"p50": percentile_s(queue, 50), "p95": percentile_s(queue, 95)},
    }


def _decision(decision: Decision, hosts: Mapping[str, str]) -> Json:
    def name(replica: str) -> str:
        return hosts.get(replica, replica)

    other = decision.alternatives[0] if decision.alternatives else None
    return {
        "at_unix_s": decision.decided_unix_s,
        "request_id": decision.request_id,
        "reason": str(decision.reason),
        "host": name(decision.chosen.replica),
        "cost_s": decision.chosen.total_s,
        "cached_tokens": decision.chosen.num_cached_tokens,
        "prompt_tokens": decision.num_prompt_tokens,
        "next": None
        if other is None
        else {"host": name(other.replica), "cost_s": other.total_s, "cached_tokens": other.num_cached_tokens},
    }


def _scaling(scaling: Mapping[str, ScalingHistory]) -> list[Json]:
    noted = [{"model": model} | asdict(each) for model, history in scaling.items() for each in history.newest]
    return sorted(noted, key=lambda each: -float(each["at_unix_s"]))[:NUM_DECISIONS_SHOWN]


def _failures(views: Iterable[ReplicaView], ingresses: Iterable[IngressView]) -> list[Json]:
    failures = [asdict(failure) | {"host": view.status.host} for view in views for failure in view.failures]
    known = {failure["request_id"] for failure in failures}
    seen = [failure for ingress in ingresses for failure in ingress.failures]
    failures += [asdict(failure) | {"host": None} for failure in seen if failure.request_id not in known]
    return sorted(failures, key=lambda each: -float(each["at_unix_s"]))[:NUM_FAILURES_SHOWN]
