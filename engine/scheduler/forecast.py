"""How long a request that arrived now would wait for its prompt to be read, and how fast the engine is.

Owns: the estimates behind Retry-After and the router's choice. Must not know: individual waiting requests; it costs the
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
    read_s = cost.prefill_s(num_unread_tokens(residency, waiting))
    num_departures = max(0, len(waiting) + 1 - residency.num_free_slots)
    usual_tokens = counters.usual_output_tokens
    if num_departures == 0 or usual_tokens is None:
        return read_s
    step_s = _decode_step_s(residency, cost, num_more_rows=0)
    return read_s + num_departures * usual_tokens * step_s / config.slots


def num_unread_tokens(residency: Residency, waiting: WaitingRoom) -> int:
    """Prompt tokens still to compute, of requests that wait and that run. A row's newest token is not counted."""
    return waiting.num_tokens + sum(max(0, request.num_uncomputed_tokens - 1) for request in residency.running())


def prefill_tokens_per_s(config: SchedulerConfig, cost: StepCostModel) -> float | None:
    """How fast prompts are read in the largest chunks; None before one was."""
    read_s = cost.prefill_s(config.max_chunk_tokens)
    return config.max_chunk_tokens / read_s if read_s > 0 else None


def usual_answer_s(residency: Residency, cost: StepCostModel, counters: Counters) -> float | None:
    """How long an answer of the usual length would be decoded, as one row more than now; None before any was."""
    usual_tokens = counters.usual_output_tokens
    if usual_tokens is None or not cost.is_known:
        return None
    return usual_tokens * _decode_step_s(residency, cost, num_more_rows=1) or None


def usual_answer_row_s(cost: StepCostModel, counters: Counters) -> float | None:
    """How much longer it would be decoded for each further row; None before any was."""
    usual_tokens = counters.usual_output_tokens
    return None if usual_tokens is None or not cost.is_known else usual_tokens * cost.decode_row_s


def _decode_step_s(residency: Residency, cost: StepCostModel, num_more_rows: int) -> float:
    running = residency.running()
    context = sum(request.num_tokens for request in running)
    num_rows = len(running) + num_more_rows
    return cost.predict_s(StepLoad(num_decode_rows=num_rows, num_decode_context_tokens=context))
