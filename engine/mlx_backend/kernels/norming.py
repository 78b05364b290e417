"""A residual sum and its norm in one launch: the kernel as a function of arrays.

Owns: its launch. Must not know: layers, models.
"""

from __future__ import annotations

import mlx.core as mx

from engine.mlx_backend.kernels import dialect
from engine.mlx_backend.kernels.launch import KernelFactory, Launch
from engine.mlx_backend.kernels.tiling import SIMD_WIDTH, vector_width

_MOST_SIMDS = 16


class AddNormKernel:
    """``x + y`` and ``rms_norm(x + y)``."""

    def __init__(self, factory: KernelFactory) -> None:
        self._factory = factory
        self._bound: dict[tuple[int, mx.Dtype], Launch] = {}

    def __call__(self, x: mx.array, y: mx.array, weight: mx.array, epsilon: mx.array) -> tuple[mx.array, mx.array]:
        """``x`` and ``y`` [M, 1, K], ``weight`` [K] of one type, ``epsilon`` fp32 [1] -> sum and norm, as ``x``."""
        (M, _, K), dtype = x.shape, x.dtype
        vec = vector_width(K, dtype.size)
        simds = min(_MOST_SIMDS, -(-K // (vec * SIMD_WIDTH)))
        if (K, dtype) not in self._bound:
            constants = {"K": K, "SIMDS": simds, "VEC": vec}
            self._bound[K, dtype] = self._factory(dialect.ADD_NORM, dtype, dtype, constants)
        total, normed = self._bound[K, dtype](
            *(x, y, weight, epsilon),
            groups=(M, 1, 1),
            num_threads=simds * SIMD_WIDTH,
            output_shapes=[x.shape, x.shape],
        )
        return total, normed
