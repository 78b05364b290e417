"""The engine's own figures for Prometheus, read when somebody asks. Pure.

Owns: which figure of an engine's status has which name. Must not know: where the status comes from.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.interfaces import EngineStatus, SchedulerStats
from engine.request import WaitReason
from serve_app.telemetry.families import Family, counter, gauge

_BYTES = "_bytes"
_STAGES = ("calm", "trimmed", "holding", "preempting")
_NONE: Mapping[str, str] = {}


def engine_families(status: EngineStatus | None, *, ready: bool, num_open_calls: int, draining: bool) -> list[Family]:
    """Return the figures; those that are not known are left out."""
    families = [
        gauge("metalslots_ready", "1: a request would be computed now.", (_NONE, ready)),
        gauge("metalslots_draining", "1: nothing new is taken.", (_NONE, draining)),
        gauge("metalslots_open_calls", "Calls that are open at the replica.", (_NONE, num_open_calls)),
    ]
    if status is None:
        return families
    families += [
        counter("metalslots_engine_restarts", "Restarts of the engine in place.", (_NONE, status.num_restarts)),
        gauge("metalslots_heartbeat_age_seconds", "Since the engine last spoke.", (_NONE, status.heartbeat_age_s)),
    ]
    return families + _scheduler(status.scheduler) + _memory(status.memory)


def _scheduler(stats: SchedulerStats) -> list[Family]:
    total = stats.num_blocks_total
    held = total - stats.num_blocks_free - stats.num_blocks_cached
    waiting = tuple(({"reason": reason}, stats.waiting_on.get(reason, 0)) for reason in WaitReason)
    blocks = (
        ({"state": "held"}, held),
        ({"state": "cached"}, stats.num_blocks_cached),
        ({"state": "free"}, stats.num_blocks_free),
    )
    return [
        gauge("vllm:num_requests_running", "Requests that hold a slot.", (_NONE, stats.num_running)),
        gauge("vllm:num_requests_waiting", "Requests without one.", (_NONE, stats.num_waiting)),
        gauge("vllm:kv_cache_usage_perc", "Part of the KV blocks in use; 1 is all.", (_NONE, held / max(1, total))),
        counter("vllm:num_preemptions", "Requests taken off their slot.", (_NONE, stats.num_preemptions)),
        gauge("metalslots_slots", "Requests that can be decoded together.", (_NONE, stats.slots)),
        gauge("metalslots_slots_peak", "The most that were, since the start.", (_NONE, stats.peak_running)),
        gauge("metalslots_waiting_requests", "Waiting requests, by what for.", *waiting),
        gauge("metalslots_waiting_tokens", "Their tokens.", (_NONE, stats.num_waiting_tokens)),
        gauge("metalslots_unread_tokens", "Prompt tokens still to be computed.", (_NONE, stats.num_unread_tokens)),
        gauge("metalslots_predicted_wait_seconds", "Wait of a newcomer, if known.", (_NONE, stats.predicted_wait_s)),
        gauge("metalslots_prefill_tokens_per_second", "Measured.", (_NONE, stats.prefill_tokens_per_s)),
        gauge("metalslots_kv_blocks", "Blocks of the KV pool, by use.", *blocks),
        counter("metalslots_steps", "Forward passes.", (_NONE, stats.num_steps)),
        counter("metalslots_draft_tokens", "Guessed tokens that were tried.", (_NONE, stats.num_draft_tokens)),
        counter("metalslots_accepted_tokens", "Guesses that came true.", (_NONE, stats.num_accepted_tokens)),
        counter("metalslots_refused_requests", "Refused because the queue was full.", (_NONE, stats.num_refused)),
        counter("metalslots_admission_waves", "Steps that let requests in.", (_NONE, stats.num_admission_waves)),
        counter("metalslots_admissions", "Times that a request got a slot.", (_NONE, stats.num_admissions)),
    ]


def _memory(memory: Mapping[str, float | int | str | None]) -> list[Family]:
    """Every term of the ledger, every reading, and what the guard does."""
    terms = tuple(
        ({"term": name.removesuffix(_BYTES)}, float(value))
        for name, value in memory.items()
        if name.endswith(_BYTES) and isinstance(value, int | float)
    )
    actions = tuple(
        ({"action": name.removeprefix("guard_action_")}, float(value))
        for name, value in memory.items()
        if name.startswith("guard_action_") and isinstance(value, int | float)
    )
    stage = memory.get("guard_stage")
    stages = tuple(({"stage": name}, float(name == stage)) for name in _STAGES) if isinstance(stage, str) else ()
    return [
        gauge("metalslots_memory_bytes", "Terms of the memory ledger, and readings.", *terms),
        gauge("metalslots_memory_guard_stage", "1: the stage in which the memory guard is.", *stages),
        counter("metalslots_memory_guard_actions", "What the memory guard has done.", *actions),
    ]
