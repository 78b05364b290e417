"""How long a request that arrived now would wait for its prompt to be read.

Owns: the estimate behind Retry-After and the router's choice. Must not know: individual waiting requests; it costs the
same however many wait.

Work ahead = reading what waits, plus, where no slot is free for the newcomer, as many departures as it takes. A full
engine sees answers of the usual length leave at the rate ``slots / (usual length * step time)``. Fair shares are left
out: a user who has been served little waits less than this.
"""

from __future__ import annotations

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.counters import Counters
from engine.scheduler.residency import Residency
from engine.scheduler.step_cost import StepCostModel, StepLoad
from engine.scheduler.waiting_room import WaitingRoom


def predicted_wait_s(
    config: SchedulerConfig, residency: Residency, waiting: WaitingRoom, cost: StepCostModel, counters: Counters
) -> float | None:
    """Seconds, or None before anything was measured."""
    if not cost.is_known:
        return None
    running = residency.running()
    num_unread = sum(max(0, request.num_uncomputed_tokens - 1) for request in running)
    read_s = cost.prefill_s(waiting.num_tokens + num_unread)
    num_departures = max(0, len(waiting) + 1 - residency.num_free_slots)
    usual_tokens = counters.usual_output_tokens
    if num_departures == 0 or usual_tokens is None:
        return read_s
    context = sum(request.num_tokens for request in running)
    step_s = cost.predict_s(StepLoad(num_decode_rows=len(running), num_decode_context_tokens=context))
    return read_s + num_departures * usual_tokens * step_s / config.slots
