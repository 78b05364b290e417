"""Query, key and value out of a joined product, queries and keys rotated: the rotation kernel as a function of arrays.

Owns: its launch. Must not know: layers, models, where frequencies come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from engine.mlx_backend.kernels import dialect
from engine.mlx_backend.kernels.launch import KernelFactory, Launch
from engine.mlx_backend.kernels.tiling import largest_divisor

_THREADS = 128
_PAIRS = 2  # per thread: sines take longer than loads, so a row is spread over many threads


@dataclass(frozen=True, slots=True)
class Heads:
    """What a row of a joined product holds: query heads, then as many key as value heads, each ``dim`` wide."""

    num_heads: int
    num_kv_heads: int
    dim: int

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.dim


class RotationKernel:
    """Splits and rotates in one launch."""

    def __init__(self, factory: KernelFactory) -> None:
        self._factory = factory
        self._bound: dict[tuple[Heads, mx.Dtype], Launch] = {}

    def __call__(
        self, joined: mx.array, positions: mx.array, frequencies: mx.array, heads: Heads
    ) -> tuple[mx.array, mx.array, mx.array]:
        """``joined`` [M, 1, heads.width], ``positions`` int32 [M], ``frequencies`` fp32 [dim / 2] in radians per
        position -> queries [M, heads, 1, dim], keys and values [M, kv_heads, 1, dim].

        Numbers i and i + dim / 2 of a query or key head turn as a pair (the halves of GPT-NeoX, not neighbours).
        """
        M, dtype = joined.shape[0], joined.dtype
        vec = largest_divisor(heads.dim // 2, _PAIRS)
        if (heads, dtype) not in self._bound:
            constants = {"D": heads.dim, "HEADS": heads.num_heads, "KV_HEADS": heads.num_kv_heads}
            constants |= {"VEC": vec, "THREADS": _THREADS}
            self._bound[heads, dtype] = self._factory(dialect.ROTATE, dtype, dtype, constants)
        shapes = [(M, count, 1, heads.dim) for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)]
        queries, keys, values = self._bound[heads, dtype](
            *(joined, positions, frequencies),
            groups=(-(-heads.width // (2 * vec * _THREADS)), M, 1),
            num_threads=_THREADS,
            output_shapes=shapes,
        )
        return queries, keys, values
