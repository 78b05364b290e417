"""Who gives up a slot when room is needed.

Owns: the choice. Must not know: how a request is taken off its slot. A preempted request keeps its tokens and its place
in line, and computes its K and V again when it returns; what the prefix cache still has of them need not be.

The request that has answered least loses least. One that has just resumed is left alone for ``IMMUNE_TOKENS`` answer
tokens, so that everybody who computes again also gets further.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.scheduler.fairness import FairShares
from engine.scheduler.request_state import Request

IMMUNE_TOKENS = 64


def is_immune(request: Request) -> bool:
    """Whether a request resumed so recently that others should go first."""
    return request.num_output_tokens < request.immune_until_output


def choose_for_blocks(running: Iterable[Request]) -> Request | None:
    """Who frees blocks: not immune unless all are, least urgent, least answered, lowest slot."""
    return min(running, key=lambda r: (is_immune(r), -r.priority, r.num_output_tokens, r.slot), default=None)


def choose_for_slot(waiting: Request, running: Iterable[Request], shares: FairShares, num_slots: int) -> Request | None:
    """Who makes way for ``waiting`` when no slot is free, or None.

    Somebody less urgent; else, when the waiting request's user holds less than a fair share of the slots, a request of
    the user who holds most above it. That user keeps the fair share, so this never starves anybody; not even when all
    who could go are immune, which is why immunity decides only between them.
    """
    fair_slots = shares.fair_slots(num_slots)
    is_below_share = shares[waiting.user].num_in_slots < fair_slots
    candidates = [
        r
        for r in running
        if r.priority > waiting.priority
        or (r.priority == waiting.priority and is_below_share and shares[r.user].num_in_slots > fair_slots)
    ]
    return min(
        candidates,
        key=lambda r: (-r.priority, is_immune(r), -shares[r.user].num_in_slots, r.num_output_tokens, r.slot),
        default=None,
    )
