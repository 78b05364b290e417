"""Products of few rows with weight matrices: the projection kernels as functions of arrays.

Owns: their launch. Must not know: layers, models. Not for Metal: the tiles' loads follow CUDA's layout (project.inc).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from engine.mlx_backend.kernels import dialect
from engine.mlx_backend.kernels.launch import KernelFactory, Launch

MAX_ROWS = 32
# By padded rows: tiles of 16 features, and runs of 32 numbers a turn. The fastest of those tried on an H200.
_TILINGS = {8: (2, 2), 16: (1, 2), MAX_ROWS: (2, 1)}
_SIMDS = 8
_K_MULTIPLE = 64
_WIDTH_MULTIPLE = 32


def can_project(weight: mx.array) -> bool:
    """Whether the kernels know this weight, [features, K]."""
    features, K = weight.shape
    return weight.dtype in (mx.float16, mx.bfloat16) and features % _WIDTH_MULTIPLE == 0 and K % _K_MULTIPLE == 0


class ProjectionKernels:
    """``x @ w.T`` for one to three weights at once."""

    def __init__(self, factory: KernelFactory) -> None:
        self._factory = factory
        self._bound: dict[tuple[int, int, mx.Dtype], Launch] = {}

    def __call__(self, x: mx.array, weights: Sequence[mx.array], widths: mx.array) -> list[mx.array]:
        """``x`` [M, 1, K] with M at most ``MAX_ROWS``, ``weights`` [N_i, K] -> results [M, 1, N_i].

        ``widths`` int32 holds the N_i.
        """
        M = x.shape[0]
        rows = next(rows for rows in _TILINGS if rows >= M)
        feats, turns = _TILINGS[rows]
        key = (len(weights), rows, x.dtype)
        if key not in self._bound:
            constants = {"ROWS": rows, "FEATS": feats, "TURNS": turns, "SIMDS": _SIMDS}
            text = dialect.PROJECTIONS[len(weights) - 1]
            self._bound[key] = self._factory(text, x.dtype, x.dtype, constants)
        features = [weight.shape[0] for weight in weights]
        return self._bound[key](
            *(x, *weights, widths),
            groups=(sum(features) // (16 * feats), 1, 1),
            num_threads=_SIMDS * 32,
            output_shapes=[(M, 1, count) for count in features],
        )
