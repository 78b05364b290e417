"""Whose prompt is read next, and how much of it in this step.

Owns: the order among requests that hold a slot and have tokens to compute. Must not know: where the budget comes from.

One prompt holds the turn until it is read: two long prompts read in alternation would both finish when the slower one
alone would have. What the holder leaves of a step's budget goes to the next in order, so several short prompts share a
step (packed rows need no padding) and at most the last of them is cut.

A short prompt may pass the holder. Each prompt can be passed ``MAX_TIMES_PASSED`` times, by prompts that together are
no longer than ``MAX_SHARE_PASSED`` of itself; after that it is read to its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.scheduler.fairness import FairShares
from engine.scheduler.request_state import Request
from engine.scheduler.step_cost import MIN_CHUNK_TOKENS, ChunkBudget

MAX_TIMES_PASSED = 16
MAX_SHARE_PASSED = 1.0
NUM_CHUNKS_SHORT = 2


def may_pass(
    request: Request, ahead: Request, shares: FairShares, max_chunk_tokens: int, beside: Sequence[Request] = ()
) -> bool:
    """Whether ``request`` is short enough to go before ``ahead``, which still has passes to give.

    Half as long is short enough. For a user who has been served less than the other, as long is too, as far as that is
    a matter of ``NUM_CHUNKS_SHORT`` chunks. ``beside`` are about to pass in the same step.
    """
    num_tokens = request.num_uncomputed_tokens
    limit = ahead.num_tokens // 2
    if shares[request.user].counter < shares[ahead.user].counter:
        limit = max(limit, min(ahead.num_tokens, NUM_CHUNKS_SHORT * max_chunk_tokens))
    num_tokens_passing = num_tokens + sum(other.num_uncomputed_tokens for other in beside)
    return (
        request.priority <= ahead.priority
        and num_tokens <= limit
        and ahead.num_times_passed + len(beside) < MAX_TIMES_PASSED
        and ahead.num_tokens_passed + num_tokens_passing <= MAX_SHARE_PASSED * ahead.num_tokens
    )


def count_pass(request: Request, ahead: Request) -> None:
    """``request`` goes before ``ahead``."""
    ahead.num_times_passed += 1
    ahead.num_tokens_passed += request.num_uncomputed_tokens


class PrefillTurn:
    """Keeps the holder of the turn between steps."""

    def __init__(self, shares: FairShares, max_chunk_tokens: int) -> None:
        self._shares = shares
        self._max_chunk_tokens = max_chunk_tokens
        self._holder: Request | None = None

    def order(self, requests: Sequence[Request]) -> list[Request]:
        """Requests with tokens to compute, in the order in which they are offered the step's budget."""
        if not requests:
            self._holder = None
            return []
        in_order = sorted(requests, key=self._key)
        holder = self._holder
        if holder is None or holder not in in_order or in_order[0].priority < holder.priority:
            holder = self._holder = in_order[0]
        in_order.remove(holder)
        passing: list[Request] = []
        behind: list[Request] = []
        new: list[Request] = []
        for request in in_order:
            if request.passing:
                passing.append(request)
            elif may_pass(request, holder, self._shares, self._max_chunk_tokens, new):
                passing.append(request)
                new.append(request)
            else:
                behind.append(request)
        return [*passing, holder, *behind]

    def share_out(self, in_order: Sequence[Request], budget: ChunkBudget) -> list[tuple[Request, int]]:
        """Tokens for each request from the step's budget, in the order given by ``order``. The first gets some."""
        chunks: list[tuple[Request, int]] = []
        is_before_holder = True
        for request in in_order:
            is_before_holder = is_before_holder and request is not self._holder
            wanted = request.num_uncomputed_tokens
            affordable = budget.tokens_from(request.num_computed_tokens)
            if chunks and affordable < min(wanted, MIN_CHUNK_TOKENS):
                break
            given = _cut(wanted, affordable, budget.num_tokens_left)
            if is_before_holder and not request.passing:
                assert self._holder is not None
                count_pass(request, self._holder)
                request.passing = True
            budget.spend(request.num_computed_tokens, given)
            chunks.append((request, given))
        return chunks

    def _key(self, request: Request) -> tuple[int, float, int]:
        return (request.priority, self._shares[request.user].counter, request.arrival)


def _cut(wanted: int, affordable: int, num_tokens_left: int) -> int:
    """How much of a prompt to read: all of it, or whole multiples of the smallest chunk.

    Steps of few different shapes are prepared once; and most chunks then end where a block does.
    """
    if wanted <= affordable:
        return wanted
    nearest = MIN_CHUNK_TOKENS * max(1, round(affordable / MIN_CHUNK_TOKENS))
    return min(wanted, num_tokens_left, nearest)
