"""How long a request that arrived now would wait for its prompt to be read.

Owns: the estimate behind Retry-After and the router's choice. Must not know: individual requests; it costs the same
however many wait.

Work ahead = reading what waits, plus, where no slot is free for the newcomer, as many departures as it takes. In a
full engine answers of the usual length leave at the rate ``slots / (usual length * step time)``.
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
    num_ahead = len(waiting)
    num_unread = sum(max(0, r.num_uncomputed_tokens - 1) for r in residency.running())
    read_s = cost.prefill_s(waiting.num_tokens + num_unread)
    num_departures = max(0, num_ahead + 1 - residency.num_free_slots)
    usual = counters.usual_output_tokens
    if num_departures == 0 or usual is None:
        return read_s
    usual_context = config.max_model_len // 4
    step_s = cost.predict_s(StepLoad(config.slots, config.slots * usual_context))
    return read_s + num_departures * usual * step_s / config.slots
