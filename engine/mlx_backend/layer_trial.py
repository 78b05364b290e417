"""Runs one part of a model beside what should stand in for it.

Owns: a cache that only records, the comparison. Must not know: what is replaced.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from engine.mlx_backend.paged_cache import PagedLayerCache

POSITIONS = (3, 977)
# Relative L2 distance, by bytes of a number: rounding, not another computation.
_TOLERANCES = {4: 1e-4, 2: 2e-2}


class Recorder(PagedLayerCache):
    """Takes what an attention layer hands to its cache, and gives the queries for a result."""

    def __init__(self) -> None:
        self.handed: list[mx.array] = []

    @property
    def offset(self) -> mx.array:
        return mx.array(POSITIONS, mx.int32)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.handed += [keys, values]
        return keys, values

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        self.handed.insert(0, queries)
        return queries


def random_rows(width: int, dtype: mx.Dtype) -> mx.array:
    """A row [1, width] for each of ``POSITIONS``."""
    rows = np.random.default_rng(6).standard_normal((len(POSITIONS), 1, width)).astype(np.float32)
    return mx.array(rows).astype(dtype)


def near(ours: mx.array, wanted: mx.array) -> bool:
    """Whether ``ours`` is ``wanted`` but for rounding."""
    if ours.shape != wanted.shape:
        return False
    tolerance = _TOLERANCES[ours.dtype.size]
    ours, wanted = ours.astype(mx.float32), wanted.astype(mx.float32)
    distance = mx.linalg.norm(ours - wanted) / mx.maximum(mx.linalg.norm(wanted), 1e-6)
    return float(np.array(distance)) <= tolerance
