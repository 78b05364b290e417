"""The sampling kernel as a function of arrays.

Owns: its launch. Must not know: requests. What it computes is what sampler.py computes for rows without bias and
penalties: the same stages, the same noise.
"""

from __future__ import annotations

import mlx.core as mx

from engine.mlx_backend.kernels import dialect
from engine.mlx_backend.kernels.launch import KernelFactory, Launch

_SIMDS = 16


class SampleKernel:
    """Chooses a token per row of logits."""

    def __init__(self, factory: KernelFactory) -> None:
        self._factory = factory
        self._by_dtype: dict[mx.Dtype, Launch] = {}

    def __call__(
        self, logits: mx.array, settings: mx.array, limits: mx.array, keys: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Tokens int32 [R], and int32 [R] with 1 where a row's logits are no numbers.

        ``logits`` [R, V]; ``settings`` fp32 [3, R]: temperature (0 = greedy), top_p, min_p; ``limits`` int32 [R]:
        top_k or V; ``keys`` int32 [2, R]: the bits of each row's random key (noise.py).
        """
        R, dtype = logits.shape[0], logits.dtype
        if dtype not in self._by_dtype:
            self._by_dtype[dtype] = self._factory(dialect.SAMPLE, dtype, dtype, {"SIMDS": _SIMDS})
        tokens, broken = self._by_dtype[dtype](
            *(logits, settings, limits, keys),
            groups=(R, 1, 1),
            num_threads=_SIMDS * 32,
            output_shapes=[(R,), (R,)],
        )
        return tokens, broken
