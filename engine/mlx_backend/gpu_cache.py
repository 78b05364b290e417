"""What a model's layer sees as its cache in a GPU step, and the kernels behind it.

Owns: which kernel does which part of a packed step's attention, and each layer's version (kernels/paged_attention.py
says why). Must not know: how a step is built or when it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.mlx_backend.fused_heads import FusedHeads
from engine.mlx_backend.gpu_inputs import WINDOW_PREFIX, ChunkShape, chunk_context_start
from engine.mlx_backend.kernels.launch import KernelFactory
from engine.mlx_backend.kernels.paged_attention import PagedKernels
from engine.mlx_backend.kernels.tiling import Geometry, Tuning
from engine.mlx_backend.paged_cache import LayerPool, PagedLayerCache, StepHolder


@dataclass(frozen=True, slots=True)
class GpuStep:
    """One forward pass on the device. ``tokens`` int32 [T, 1], ``positions`` int32 [T]; decode rows come first.

    ``arrays`` are the upload's other parts: ``lengths`` [R] and ``table`` [R, n] of the decode rows, ``chunk_targets``
    of all chunks, ``chunks`` and ``chunk_tables`` of paged ones, ``chunk_table{i}`` and ``span_{window}_{i}`` of each
    gathered one; tables and targets once more, with ``WINDOW_PREFIX``, where sliding-window layers have a pool of
    their own. ``head_rows`` int32 are the rows whose logits are wanted.
    """

    tokens: mx.array
    positions: mx.array
    head_rows: mx.array
    num_decode_rows: int
    num_chunk_rows: int
    gathered: tuple[ChunkShape, ...]
    arrays: dict[str, mx.array]


class KernelBook:
    """Kernels by layer geometry; scale and sinks are known when a layer first attends. ``kv_bits``: of packed pools."""

    def __init__(self, block_size: int, factory: KernelFactory, tuning: Tuning, kv_bits: int | None = None) -> None:
        self.block_size, self.factory, self.tuning, self.kv_bits = block_size, factory, tuning, kv_bits
        self._kernels: dict[tuple[Geometry, mx.Dtype, mx.Dtype], PagedKernels] = {}

    def kernels(self, geometry: Geometry, dtype: mx.Dtype, pool_dtype: mx.Dtype) -> PagedKernels:
        """The kernels of ``geometry``, bound once."""
        key = (geometry, dtype, pool_dtype)
        if key not in self._kernels:
            self._kernels[key] = PagedKernels(geometry, dtype, pool_dtype, self.factory, self.tuning, self.kv_bits)
        return self._kernels[key]


class GpuLayerCache(PagedLayerCache):
    """One layer's cache. Keys and values are stored by the kernels that attend, so that each pool access is one link
    of the layer's chain of versions. Heads that ``fused`` has are taken from there, not from what the layer hands over.
    ``is_apart``: the pool is one of sliding-window layers, with block tables of its own.
    """

    def __init__(
        self,
        pool: LayerPool,
        holder: StepHolder,
        max_model_len: int,
        book: KernelBook,
        fused: FusedHeads | None,
        is_apart: bool,
    ) -> None:
        super().__init__(pool, holder, max_model_len)
        self._prefix = WINDOW_PREFIX if is_apart else ""
        self._fused = fused
        self.version = mx.zeros((1,), mx.int32)
        self._gpu_holder = holder
        self._book = book
        self._new: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keep the step's keys and values for ``attend``."""
        self._new = keys, values
        return keys, values

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Store the step's keys and values and attend, ``queries`` [T, heads, 1, head_dim]; same shape out."""
        step = self._gpu_holder.inputs
        assert isinstance(step, GpuStep)
        assert self._new is not None, "attention before the step's keys are known"
        self.num_attends += 1
        (keys, values), self._new = self._new, None
        taken = self._fused.take(step.positions) if self._fused is not None else None
        if taken is not None:
            queries, keys, values = taken
        kernels = self._kernels(queries, scale, sinks)
        outputs = []
        R = step.num_decode_rows
        if R:
            out, self.version = kernels.decode(
                *(queries[:R], keys[:R], values[:R], self.pool),
                *(step.arrays[f"{self._prefix}table"], step.arrays["lengths"], self.version, sinks),
            )
            outputs.append(out)
        if step.num_chunk_rows:
            targets = step.arrays[f"{self._prefix}chunk_targets"]
            self.version = kernels.write(keys[R:], values[R:], self.pool, targets, self.version)
        if step.num_chunk_rows and not step.gathered:
            tables = step.arrays[f"{self._prefix}chunk_tables"]
            out, self.version = kernels.attend_chunks(
                *(queries[R:], self.pool, tables, step.arrays["chunks"], self.version, sinks)
            )
            outputs.append(out)
        outputs += [
            self._attend_gathered(kernels, step, index, queries, keys, values, scale, sinks)
            for index in range(len(step.gathered))
        ]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)

    def copy_blocks(self, pairs: mx.array) -> None:
        """Copy whole blocks, ``pairs`` int32 [N, 2] of source and target, after all steps built so far."""
        shape = self.pool.shape
        geometry = Geometry(shape.num_kv_heads, shape.num_kv_heads, shape.k_head_dim, self._book.block_size, 1.0)
        dtype = self.pool.dtype
        self.version = self._book.kernels(geometry, dtype, dtype).copy_blocks(self.pool, pairs, self.version)

    def _attend_gathered(
        self,
        kernels: PagedKernels,
        step: GpuStep,
        index: int,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        chunk, window = step.gathered[index], kernels.geometry.window
        rows = slice(chunk.first, chunk.first + chunk.count)
        first = chunk_context_start(chunk.start, window, self._book.block_size)
        num_positions = chunk.start + chunk.count - first
        if num_positions == chunk.count and kernels.kv_bits is None:
            # Nothing before the chunk: its own keys and values are all there is. A packed pool gives back others.
            k, v = (x[rows].transpose(2, 1, 0, 3) for x in (keys, values))
        else:
            table, span = step.arrays[f"{self._prefix}chunk_table{index}"], step.arrays[f"span_{window}_{index}"]
            k, v, self.version = kernels.gather(self.pool, table, span, num_positions, self.version)
        out = mx.fast.scaled_dot_product_attention(
            queries[rows].transpose(2, 1, 0, 3),
            *(k, v),
            scale=scale,
            mask=_window_mask(chunk, first, window) if window and num_positions > window else "causal",
            sinks=sinks,
        )
        return out.transpose(2, 1, 0, 3)

    def _kernels(self, queries: mx.array, scale: float, sinks: mx.array | None) -> PagedKernels:
        shape = self.pool.shape
        geometry = Geometry(
            num_heads=queries.shape[1],
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.k_head_dim,
            block_size=self._book.block_size,
            scale=scale,
            window=shape.window or 0,
            has_sinks=sinks is not None,
        )
        return self._book.kernels(geometry, queries.dtype, self.pool.dtype)


def _window_mask(chunk: ChunkShape, first: int, window: int) -> mx.array:
    query = np.arange(chunk.start, chunk.start + chunk.count)[:, None]
    key = np.arange(first, chunk.start + chunk.count)[None]
    return mx.array((key <= query) & (key > query - window))
