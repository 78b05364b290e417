"""Who runs and who waits, one by one, for people to look at.

Owns: how a request is shown. Must not know: who looks. Made a few times a second, so it is bounded.
"""

from __future__ import annotations

from engine.interfaces import RunningView, WaitingView
from engine.request import WaitReason
from engine.scheduler.request_state import Place, Request
from engine.scheduler.residency import Residency
from engine.scheduler.waiting_room import WaitingRoom

NUM_WAITING_SHOWN = 32


def views(
    residency: Residency, waiting: WaitingRoom, now_s: float
) -> tuple[tuple[RunningView, ...], tuple[WaitingView, ...]]:
    """The requests that hold slots, in slot order, and the first of those that wait."""
    running = tuple(_running(request, now_s) for request in residency.running())
    return running, tuple(_waiting(request, waiting, now_s) for request in waiting.first(NUM_WAITING_SHOWN))


def _running(request: Request, now_s: float) -> RunningView:
    own = request.wait.own_reason
    return RunningView(
        slot=request.slot,
        request_id=request.request_id,
        user=request.user,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=request.num_output_tokens,
        age_s=now_s - request.asked.received_s,
        waits_for=None if own is None else own.value,
    )


def _waiting(request: Request, waiting: WaitingRoom, now_s: float) -> WaitingView:
    reason = WaitReason.PREFILL_TURN if request.place is Place.PARKED else waiting.clock.reason
    return WaitingView(
        request_id=request.request_id,
        user=request.user,
        num_tokens=len(request.token_ids),
        age_s=now_s - request.asked.received_s,
        waits_for=reason.value,
        num_preemptions=request.num_preemptions,
    )
