"""Products of few rows with a weight matrix: the projection kernel as a function of arrays.

Owns: its launch. Must not know: layers, models. Not for Metal: the tiles' loads follow CUDA's layout (project.inc).
"""

from __future__ import annotations

import mlx.core as mx

from engine.mlx_backend.kernels import dialect
from engine.mlx_backend.kernels.launch import KernelFactory, Launch
from engine.mlx_backend.kernels.tiling import largest_divisor

MAX_ROWS = 32
# By padded rows: tiles of 16 features, and runs of 32 numbers a turn. The fastest of those tried on an H200.
TILINGS = {8: (1, 4), 16: (2, 4), MAX_ROWS: (2, 2)}
_SIMDS = 8
_K_MULTIPLE = 64
_WIDTH_MULTIPLE = 32


def can_project(weight: mx.array) -> bool:
    """Whether the kernel knows this weight, [features, K]."""
    features, K = weight.shape
    return weight.dtype in (mx.float16, mx.bfloat16) and features % _WIDTH_MULTIPLE == 0 and K % _K_MULTIPLE == 0


class ProjectionKernel:
    """``x @ w.T``, tiled as ``tilings`` say: by padded rows, (tiles of 16 features, runs of 32 numbers a turn)."""

    def __init__(self, factory: KernelFactory, tilings: dict[int, tuple[int, int]] = TILINGS) -> None:
        self._factory, self._tilings = factory, tilings
        self._bound: dict[tuple[int, int, mx.Dtype], Launch] = {}

    def __call__(self, x: mx.array, weight: mx.array) -> mx.array:
        """``x`` [M, 1, K] with M at most ``MAX_ROWS``, ``weight`` [N, K] -> [M, 1, N]."""
        M, (N, K) = x.shape[0], weight.shape
        rows = next(rows for rows in self._tilings if rows >= M)
        feats, turns = self._tilings[rows]
        turns = largest_divisor(K // 32, turns)
        key = (rows, turns, x.dtype)
        if key not in self._bound:
            constants = {"ROWS": rows, "FEATS": feats, "TURNS": turns, "SIMDS": _SIMDS}
            self._bound[key] = self._factory(dialect.PROJECT, x.dtype, x.dtype, constants)
        (result,) = self._bound[key](
            *(x, weight), groups=(N // (16 * feats), 1, 1), num_threads=_SIMDS * 32, output_shapes=[(M, 1, N)]
        )
        return result
