"""How long a step takes, learnt from the steps that ran, and how large a prompt chunk may be.

Owns: the cost model and the size of the next chunk. Must not know: requests or clocks; times come in with results.

    decode part   fixed + per decode row + per context token that the decode rows read
    chunk part    fixed + per chunk token + per (query, key) pair that the chunk attends to

The two parts are fitted apart: steps without a chunk teach the first, and what a step with a chunk takes beyond the
first teaches the second. One cost per context token would be wrong for both, since decode rows are bound by reading
K and V while a chunk is bound by arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.scheduler.robust_fit import RobustFit

# A chunk smaller than this costs nearly as much as this: the step's weights are read either way.
MIN_CHUNK_TOKENS = 16
# When decoding alone takes as long as the stall target, prompts still get this share of the step on top.
# (Slices of 32 tokens under a fixed cost of 250 ms a step made prefill 4.6 times slower in another engine.)
MIN_CHUNK_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes. ``num_chunk_pairs``: (query, key) pairs of all chunks."""

    num_decode_rows: int = 0
    num_decode_context_tokens: int = 0
    num_chunk_tokens: int = 0
    num_chunk_pairs: int = 0


def num_causal_pairs(start: int, num_tokens: int) -> int:
    """Pairs of a chunk whose first token is at position ``start``: token i attends to ``start + i + 1`` positions."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class StepCostModel:
    """Predicts step times. ``max_chunk_tokens`` is the ceiling of every answer."""

    def __init__(self, target_stall_s: float, max_chunk_tokens: int) -> None:
        self._target_stall_s = target_stall_s
        self._max_chunk_tokens = max_chunk_tokens
        self._decode = RobustFit(scales=(1.0, 8.0, 16_384.0))
        self._chunk = RobustFit(scales=(1.0, 256.0, 262_144.0))

    @property
    def is_known(self) -> bool:
        """Whether anything was measured yet."""
        return self._decode.num_observed + self._chunk.num_observed > 0

    def observe(self, load: StepLoad, elapsed_s: float) -> None:
        """A step with this load took ``elapsed_s``."""
        if not (math.isfinite(elapsed_s) and elapsed_s > 0.0):
            return
        if load.num_chunk_tokens == 0:
            self._decode.observe(_decode_features(load), elapsed_s)
        else:
            beyond_s = elapsed_s - self._decode_s(load)
            self._chunk.observe((1.0, load.num_chunk_tokens, load.num_chunk_pairs), max(0.0, beyond_s))

    def predict_s(self, load: StepLoad) -> float:
        """Predicted seconds; 0 while nothing is known."""
        chunk_s = 0.0
        if load.num_chunk_tokens:
            chunk_s = self._chunk.predict((1.0, load.num_chunk_tokens, load.num_chunk_pairs))
        return self._decode_s(load) + chunk_s

    def chunk_tokens(self, load: StepLoad, start: int) -> int:
        """The largest chunk from position ``start`` that may join a step with this decode load.

        With nobody decoding it is the ceiling: nobody is kept waiting between two tokens.
        """
        if load.num_decode_rows == 0:
            return self._max_chunk_tokens
        if self._chunk.num_observed == 0:
            return min(self._max_chunk_tokens, max(MIN_CHUNK_TOKENS, self._max_chunk_tokens // 4))
        decode_s = self._decode_s(load)
        budget_s = max(self._target_stall_s - decode_s, decode_s * MIN_CHUNK_SHARE / (1.0 - MIN_CHUNK_SHARE))
        return max(MIN_CHUNK_TOKENS, min(self._max_chunk_tokens, self._tokens_within(budget_s, start)))

    def prefill_s(self, num_tokens: int) -> float:
        """Predicted seconds to read ``num_tokens`` prompt tokens in the largest chunks, attention left out."""
        fixed_s, per_token_s, _ = self._chunk.coefficients
        return fixed_s * num_tokens / self._max_chunk_tokens + per_token_s * num_tokens

    def _decode_s(self, load: StepLoad) -> float:
        return self._decode.predict(_decode_features(load)) if load.num_decode_rows else 0.0

    def _tokens_within(self, budget_s: float, start: int) -> int:
        """Largest n with fixed + n * token + pairs(start, n) * pair <= budget: a quadratic in n."""
        fixed_s, per_token_s, per_pair_s = self._chunk.coefficients
        room_s = budget_s - fixed_s
        if room_s <= 0.0:
            return 0
        linear = per_token_s + per_pair_s * (start + 0.5)
        if linear <= 0.0:
            return self._max_chunk_tokens
        # The stable form of the root: no cancellation when the quadratic term is small.
        root = math.sqrt(linear * linear + 2.0 * per_pair_s * room_s)
        return int(2.0 * room_s / (linear + root))


def _decode_features(load: StepLoad) -> tuple[float, float, float]:
    return (1.0, load.num_decode_rows, load.num_decode_context_tokens)
