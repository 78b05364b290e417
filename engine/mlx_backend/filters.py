"""Which tokens a row may draw: the lowest score that top_k, top_p and min_p leave.

Owns: the cut-off of each row. Must not know: noise, penalties, requests.

Scores are ``(logits - max) / temperature``, so the best token has 0. top_k comes first, top_p works on what top_k left
(renormalised), min_p on the ratio to the best token. All tokens that tie with the last one kept are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

_NUM_CANDIDATES = 1024
_INF_BITS = 0x7F800000


@dataclass(frozen=True, slots=True)
class Filters:
    """One value per row; ``top_k`` is at least 1, the vocabulary size when off."""

    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]

    def is_off(self, vocab_size_tokens: int) -> bool:
        """Whether no row leaves any token out."""
        return bool((self.top_k >= vocab_size_tokens).all() and (self.top_p >= 1).all() and (self.min_p <= 0).all())


def keep_allowed(scores: mx.array, filters: Filters, *, host_may_wait: bool) -> mx.array:
    """``scores`` ``[R, V]`` with -inf where a token is left out.

    ``host_may_wait``: whether this may look at values before it goes on (much less work on the CPU).
    """
    find = floor_by_sorting if host_may_wait else floor_by_bisection
    floor = mx.maximum(find(scores, filters), _min_p_floor(filters))
    return mx.where(scores >= floor, scores, -mx.inf)


def floor_by_sorting(scores: mx.array, filters: Filters) -> mx.array:
    """Lowest score kept by top_k and top_p, ``[R, 1]``, from the best 1,024 tokens where they hold enough."""
    V = scores.shape[-1]
    limited = filters.top_k < V
    num_candidates = int(max(_NUM_CANDIDATES, filters.top_k[limited].max(initial=0)))
    if num_candidates < V:
        floor, covered = _floor_among(scores, filters, num_candidates)
        if bool(mx.all(covered).item()):
            return floor
    return _floor_among(scores, filters, V)[0]


def _floor_among(scores: mx.array, filters: Filters, count: int) -> tuple[mx.array, mx.array]:
    V = scores.shape[-1]
    top = -mx.sort(mx.partition(-scores, count - 1, axis=-1)[:, :count] if count < V else -scores, axis=-1)
    top_k, top_p = mx.array(filters.top_k)[:, None], mx.array(filters.top_p)[:, None]
    top = mx.where(mx.arange(count)[None] < top_k, top, -mx.inf)
    limited = top_k < V
    total = mx.where(limited, mx.logsumexp(top, axis=-1, keepdims=True), mx.logsumexp(scores, axis=-1, keepdims=True))
    mass = mx.exp(top - total)
    before = mx.cumsum(mass, axis=-1) - mass
    # A sum of rounded masses may reach 1 before the last token: top_p 1 is off, whatever the sum says.
    kept = ((before < top_p) | (top_p >= 1)) & (top > -mx.inf)
    floor = mx.min(mx.where(kept, top, 0.0), axis=-1, keepdims=True)
    unlimited = mx.logical_not(limited) & (top_p >= 1)
    covered = limited | unlimited | (mx.sum(mass, axis=-1, keepdims=True) >= top_p)
    return mx.where(unlimited, -mx.inf, floor), covered


def floor_by_bisection(scores: mx.array, filters: Filters) -> mx.array:
    """As ``floor_by_sorting``, in a fixed number of passes over the scores and without waiting for any value.

    Negated scores are not negative, and such floats are ordered like their bits: 31 halvings of the bits find the
    exact score at which the count reaches top_k, and then the one at which the mass reaches top_p.
    """
    depth = -scores
    top_k, top_p = mx.array(filters.top_k)[:, None], mx.array(filters.top_p)[:, None]
    depth_k = _bisect(lambda limit: mx.sum(depth <= limit, axis=-1, keepdims=True) >= top_k, len(filters.top_k))
    mass = mx.where(depth <= depth_k, mx.exp(scores), 0.0)
    wanted = top_p * mx.sum(mass, axis=-1, keepdims=True)
    depth_p = _bisect(
        lambda limit: mx.sum(mx.where(depth <= limit, mass, 0.0), axis=-1, keepdims=True) >= wanted, len(filters.top_k)
    )
    return -mx.where(top_p >= 1, depth_k, mx.minimum(depth_k, depth_p))


def _bisect(enough: Callable[[mx.array], mx.array], num_rows: int) -> mx.array:
    """The least non-negative float per row, ``[R, 1]``, for which ``enough`` holds; inf where it never does."""
    low = mx.full((num_rows, 1), -1, mx.int32)
    high = mx.full((num_rows, 1), _INF_BITS, mx.int32)
    for _ in range(31):
        middle = low + (high - low) // 2
        holds = enough(middle.view(mx.float32))
        low, high = mx.where(holds, low, middle), mx.where(holds, middle, high)
    return high.view(mx.float32)


def _min_p_floor(filters: Filters) -> mx.array:
    with np.errstate(divide="ignore"):
        return mx.array(np.log(filters.min_p, dtype=np.float32))[:, None]
