"""The kernels of one layer kind, as functions of arrays: decode attention, chunk write, chunk gather, block copy.

Owns: shapes, launch grids and the order of pool accesses. Must not know: requests, steps, models.

The kernels write the pool in place, behind MLX's back: MLX orders GPU work by the buffers it sees as outputs, and the
pool is none. Every function that touches a layer's pool therefore takes that layer's *version* (int32 ``[1]``) and
returns the next one, and callers hand each version to exactly one call: all accesses of a layer are one chain.

Pools are ``[kv_heads * pool_rows, head_dim]``, head-major (paged_cache.py). A packed pool has three arrays for the keys
and three for the values, with as many rows: codes (uint32), scales and biases (fp16; quantised_pool.py).
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from engine.mlx_backend.kernels import dialect
from engine.mlx_backend.kernels.launch import KernelFactory, Launch
from engine.mlx_backend.kernels.tiling import (
    KV_GROUP,
    SIMD_WIDTH,
    Geometry,
    Tuning,
    attends_chunks,
    chunk_constants,
    chunk_reduce_constants,
    decode_constants,
    num_chunk_groups,
    num_chunk_splits,
    num_splits,
    reduce_constants,
    tile_decode,
    vector_width,
)

_THREADS = 256
_LOG2_E = 1.44269504088896


class Pool(Protocol):
    """A layer's keys and values."""

    def arrays(self) -> list[mx.array]:
        """All arrays of the keys, then all of the values."""
        ...


class PagedKernels:
    """Kernels for layers of one ``geometry`` with numbers of ``dtype`` and pools of ``pool_dtype``.

    With ``kv_bits`` (8 or 4) pools are packed, and their numbers are read as ``pool_dtype``.
    """

    def __init__(
        self,
        geometry: Geometry,
        dtype: mx.Dtype,
        pool_dtype: mx.Dtype,
        factory: KernelFactory,
        tuning: Tuning,
        kv_bits: int | None = None,
    ) -> None:
        assert kv_bits is None or geometry.head_dim % KV_GROUP == 0, f"{geometry.head_dim} are no whole groups"
        self.geometry, self.tuning, self.kv_bits = geometry, tuning, kv_bits
        self.tiling = tile_decode(geometry, pool_dtype.size, tuning, kv_bits)
        D, block = geometry.head_dim, geometry.block_size
        self._vec = vector_width(D, max(dtype.size, pool_dtype.size))
        self._written_vec = max(self._vec, 32 // kv_bits) if kv_bits else self._vec
        self._reduce_threads = min(128, -(-D // 32) * 32)

        def bind(text: dialect.KernelText, constants: dict[str, int]) -> Launch:
            return factory(text, dtype, pool_dtype, constants)

        def bind_to_pool(text: dialect.KernelText, constants: dict[str, int]) -> Launch:
            return bind(dialect.packed(text), {**constants, "BITS": kv_bits}) if kv_bits else bind(text, constants)

        pieces = {"D": D, "KV_HEADS": geometry.num_kv_heads, "VEC": self._vec, "THREADS": _THREADS}
        self._decode_whole = bind_to_pool(dialect.DECODE_WHOLE, decode_constants(geometry, self.tiling))
        self._decode_split = bind_to_pool(dialect.DECODE_SPLIT, decode_constants(geometry, self.tiling))
        self._reduce = bind(dialect.DECODE_REDUCE, reduce_constants(geometry, self.tiling, self._reduce_threads))
        self._write = bind_to_pool(dialect.CHUNK_WRITE, {**pieces, "VEC": self._written_vec})
        self._gather = bind_to_pool(dialect.CHUNK_GATHER, {**pieces, "BLOCK": block})
        self.attends_chunks = attends_chunks(geometry, dtype.size)
        self._chunk_whole = bind_to_pool(dialect.CHUNK_WHOLE, chunk_constants(geometry, self._vec, tuning))
        self._chunk_split = bind_to_pool(dialect.CHUNK_SPLIT, chunk_constants(geometry, self._vec, tuning))
        self._chunk_reduce = bind(dialect.CHUNK_REDUCE, chunk_reduce_constants(geometry, self._reduce_threads))
        self._copies = [
            _BlockCopy(kind, width, geometry, factory) for kind, width in _held_rows(D, pool_dtype, kv_bits)
        ]
        # With a soft cap the scores are capped before they go to base 2.
        scale = geometry.scale if geometry.soft_cap else geometry.scale * _LOG2_E
        self._scales = mx.array([scale, geometry.soft_cap], mx.float32)
        self._no_sinks = mx.zeros((1,), dtype)
        mx.eval(self._scales, self._no_sinks)

    def decode(
        self,
        queries: mx.array,
        k_new: mx.array,
        v_new: mx.array,
        pool: Pool,
        block_table: mx.array,
        seq_lens: mx.array,
        version: mx.array,
        sinks: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Store each row's new token and attend over its context, the token included.

        ``queries`` [B, heads, 1, D], ``k_new`` and ``v_new`` [B, kv_heads, 1, D]; ``block_table`` int32 [B, n];
        ``seq_lens`` int32 [B] counts the new token, 0 = an empty row (zeros out, nothing stored).
        Returns the result [B, heads, 1, D] and the pool's next version.
        """
        B, n = block_table.shape
        g, tiling = self.geometry, self.tiling
        splits = num_splits(g, tiling, B, n * g.block_size, self.tuning)
        sinks = self._no_sinks if sinks is None else sinks
        inputs = (queries, k_new, v_new, *pool.arrays(), block_table, seq_lens, self._scales, sinks, version)
        groups = (1, g.num_kv_heads * tiling.tiles * splits, B)
        if splits == 1:
            out, version = self._decode_whole(
                *inputs, groups=groups, num_threads=tiling.num_threads, output_shapes=[queries.shape, (1,)]
            )
            return out, version
        rows = B * g.num_heads
        partial, top, total, version = self._decode_split(
            *inputs,
            groups=groups,
            num_threads=tiling.num_threads,
            output_shapes=[(rows, splits, g.head_dim), (rows, splits), (rows, splits), (1,)],
        )
        (out,) = self._reduce(
            *(partial, top, total, seq_lens, sinks),
            groups=(rows, 1, 1),
            num_threads=self._reduce_threads,
            output_shapes=[queries.shape],
        )
        return out, version

    def write(self, k_new: mx.array, v_new: mx.array, pool: Pool, targets: mx.array, version: mx.array) -> mx.array:
        """Store ``k_new`` and ``v_new`` [N, kv_heads, 1, D] at places ``targets`` int32 [N] of the pool (-1: nowhere).

        Returns the pool's next version.
        """
        pieces = k_new.shape[0] * self.geometry.head_dim // self._written_vec
        (version,) = self._write(
            *(k_new, v_new, *pool.arrays(), targets, version),
            groups=(-(-pieces // _THREADS), self.geometry.num_kv_heads, 1),
            num_threads=_THREADS,
            output_shapes=[(1,)],
        )
        return version

    def attend_chunks(
        self,
        queries: mx.array,
        pool: Pool,
        block_table: mx.array,
        chunks: mx.array,
        version: mx.array,
        sinks: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Causal attention of prompt chunks whose keys and values are in the pool already (``write``).

        ``queries`` [N, heads, 1, D] of all chunks; ``chunks`` int32 [n, 3]: each one's first row in ``queries``, number
        of tokens (0: padding) and first position; ``block_table`` int32 [n, m], from position 0 on.
        Returns the result, shaped as ``queries`` (rows of no chunk are undefined), and the pool's next version.
        """
        assert self.attends_chunks
        g, N = self.geometry, queries.shape[0]
        sinks = self._no_sinks if sinks is None else sinks
        splits = num_chunk_splits(g, N, block_table.shape[1] * g.block_size, self.tuning)
        inputs = (queries, *pool.arrays(), block_table, chunks, self._scales, sinks, version)
        groups = (num_chunk_groups(g, N, self.tuning), g.num_kv_heads * splits, chunks.shape[0])
        threads = self.tuning.chunk_simds * SIMD_WIDTH
        if splits == 1:
            out, version = self._chunk_whole(
                *inputs, groups=groups, num_threads=threads, output_shapes=[queries.shape, (1,)]
            )
            return out, version
        rows = N * g.num_heads
        partial, top, total, version = self._chunk_split(
            *inputs,
            groups=groups,
            num_threads=threads,
            output_shapes=[(rows, splits, g.head_dim), (rows, splits), (rows, splits), (1,)],
        )
        (out,) = self._chunk_reduce(
            *(partial, top, total, sinks),
            groups=(rows, 1, 1),
            num_threads=self._reduce_threads,
            output_shapes=[queries.shape],
        )
        return out, version

    def gather(
        self, pool: Pool, block_table: mx.array, span: mx.array, num_positions: int, version: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """One sequence's positions ``[span[0], span[1])`` as keys and values [1, kv_heads, num_positions, D].

        ``block_table`` int32 [n] starts at position 0; ``span`` int32 [3], its last entry is ``num_positions``.
        Positions behind ``span[1]`` are zeros. Returns keys, values and the pool's next version.
        """
        g = self.geometry
        shape = (1, g.num_kv_heads, num_positions, g.head_dim)
        pieces = num_positions * g.head_dim // self._vec
        keys, values, version = self._gather(
            *(*pool.arrays(), block_table, span, version),
            groups=(-(-pieces // _THREADS), g.num_kv_heads, 1),
            num_threads=_THREADS,
            output_shapes=[shape, shape, (1,)],
        )
        return keys, values, version

    def copy_blocks(self, pool: Pool, pairs: mx.array, version: mx.array) -> mx.array:
        """Copy whole blocks, ``pairs`` int32 [N, 2] of source and target. Returns the pool's next version."""
        arrays = pool.arrays()
        of_keys, of_values = arrays[: len(self._copies)], arrays[len(self._copies) :]
        for copy, keys, values in zip(self._copies, of_keys, of_values, strict=True):
            version = copy(keys, values, pairs, version)
        return version


def _held_rows(head_dim: int, pool_dtype: mx.Dtype, kv_bits: int | None) -> list[tuple[mx.Dtype, int]]:
    """Of each array of a pool's keys (or values): the type of its numbers, and how many a position has."""
    if kv_bits is None:
        return [(pool_dtype, head_dim)]
    num_groups = head_dim // KV_GROUP
    return [(mx.uint32, head_dim * kv_bits // 32), (mx.float16, num_groups), (mx.float16, num_groups)]


class _BlockCopy:
    """Copies whole blocks of one array of keys and one of values, ``width`` numbers of ``dtype`` a position."""

    def __init__(self, dtype: mx.Dtype, width: int, geometry: Geometry, factory: KernelFactory) -> None:
        self._num_kv_heads, block = geometry.num_kv_heads, geometry.block_size
        vec = vector_width(width, dtype.size)
        self._num_pieces = block * width // vec
        constants = {"D": width, "KV_HEADS": self._num_kv_heads, "BLOCK": block, "VEC": vec, "THREADS": _THREADS}
        self._copy = factory(dialect.BLOCK_COPY, dtype, dtype, constants)

    def __call__(self, keys: mx.array, values: mx.array, pairs: mx.array, version: mx.array) -> mx.array:
        """Start after ``version``; returns the next one."""
        (version,) = self._copy(
            *(keys, values, pairs, version),
            groups=(-(-self._num_pieces // _THREADS), self._num_kv_heads, pairs.shape[0]),
            num_threads=_THREADS,
            output_shapes=[(1,)],
        )
        return version
