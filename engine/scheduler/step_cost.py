"""How long a step takes, learnt from the steps that ran, and how large a prompt chunk may be.

Owns: the cost model and the size of the next chunk. Must not know: requests or clocks; times come in with results.

    every step    fixed + per decode row + per context token that the decode rows read
    with a chunk  fixed + per chunk token + per (query, key) pair that the chunk attends to, on top

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


@dataclass(slots=True)
class ChunkBudget:
    """What a step still has for prompts: tokens and seconds, spent chunk by chunk."""

    num_tokens_left: int
    left_s: float
    per_token_s: float
    per_pair_s: float

    def tokens_from(self, start: int) -> int:
        """Largest n with n * token + pairs(start, n) * pair <= left: a quadratic in n."""
        linear_s = self.per_token_s + self.per_pair_s * (start + 0.5)
        if self.left_s <= 0.0:
            return 0
        if math.isinf(self.left_s) or linear_s <= 0.0:
            return self.num_tokens_left
        # The stable form of the root: nothing cancels when the quadratic term is small.
        root_s = math.sqrt(linear_s * linear_s + 2.0 * self.per_pair_s * self.left_s)
        return min(self.num_tokens_left, int(2.0 * self.left_s / (linear_s + root_s)))

    def spend(self, start: int, num_tokens: int) -> None:
        """A chunk was given out."""
        self.num_tokens_left -= num_tokens
        self.left_s -= self.per_token_s * num_tokens + self.per_pair_s * num_causal_pairs(start, num_tokens)


class StepCostModel:
    """Predicts step times. A step holds ``max_chunk_tokens`` prompt tokens at most."""

    def __init__(self, target_stall_s: float, max_chunk_tokens: int) -> None:
        self._target_stall_s = target_stall_s
        self._max_chunk_tokens = max_chunk_tokens
        self._decode = RobustFit(scales=(1.0, 8.0, 16_384.0))
        self._chunk = RobustFit(scales=(1.0, 256.0, 262_144.0))

    @property
    def is_known(self) -> bool:
        """Whether anything was measured yet."""
        return self._decode.num_observed + self._chunk.num_observed > 0

    @property
    def decode_row_s(self) -> float:
        """Seconds that each further decode row adds to a step."""
        return self._decode.coefficients[1]

    def observe(self, load: StepLoad, elapsed_s: float) -> None:
        """A step with this load took ``elapsed_s``."""
        if not (math.isfinite(elapsed_s) and elapsed_s > 0.0):
            return
        if load.num_chunk_tokens == 0:
            self._decode.observe((1.0, load.num_decode_rows, load.num_decode_context_tokens), elapsed_s)
        else:
            beyond_s = elapsed_s - self._decode_s(load)
            self._chunk.observe((1.0, load.num_chunk_tokens, load.num_chunk_pairs), max(0.0, beyond_s))

    def predict_s(self, load: StepLoad) -> float:
        """Predicted seconds; 0 while nothing is known."""
        chunk_s = 0.0
        if load.num_chunk_tokens:
            chunk_s = self._chunk.predict((1.0, load.num_chunk_tokens, load.num_chunk_pairs))
        return self._decode_s(load) + chunk_s

    def chunk_budget(self, load: StepLoad) -> ChunkBudget:
        """How much prompt may join a step with this decode load.

        With nobody decoding the ceiling is the only limit: nobody is kept waiting between two tokens.
        """
        if load.num_decode_rows == 0:
            return ChunkBudget(self._max_chunk_tokens, math.inf, 0.0, 0.0)
        if self._chunk.num_observed == 0:
            num_tokens = min(self._max_chunk_tokens, max(MIN_CHUNK_TOKENS, self._max_chunk_tokens // 4))
            return ChunkBudget(num_tokens, math.inf, 0.0, 0.0)
        decode_s = self._decode_s(load)
        least_s = decode_s * MIN_CHUNK_SHARE / (1.0 - MIN_CHUNK_SHARE)
        fixed_s, per_token_s, per_pair_s = self._chunk.coefficients
        left_s = max(self._target_stall_s - decode_s, least_s) - fixed_s
        return ChunkBudget(self._max_chunk_tokens, left_s, per_token_s, per_pair_s)

    def prefill_s(self, num_tokens: int) -> float:
        """Predicted seconds to read ``num_tokens`` prompt tokens in the largest chunks, attention left out."""
        fixed_s, per_token_s, _ = self._chunk.coefficients
        return fixed_s * num_tokens / self._max_chunk_tokens + per_token_s * num_tokens

    def _decode_s(self, load: StepLoad) -> float:
        return self._decode.predict((1.0, load.num_decode_rows, load.num_decode_context_tokens))
