"""The KV pool of each layer, and the cache object through which a model meets it.

Owns: pool arrays and their layout, writing a step's keys and values, gathering blocks, copying blocks. Must not know:
which request owns a block, how attention is computed (attention.py), what a row is for.

Layout of a layer's keys (values alike): ``[kv_heads * (num_blocks + 1) * block_size, head_dim]``, head-major, so that
gathering whole blocks gives contiguous ``[kv_heads, positions, head_dim]`` without a transposing copy. The extra last
block of each head is the *null block*: always zero, it pads gathers.

The arrays are written by indexed assignment, which is in place only while nothing but the graph holds the array: a
view that is kept, or a GPU that still computes the step before, makes each write copy the whole pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.errors import UnsupportedModelError
from engine.mlx_backend.gathered_attention import attend
from engine.mlx_backend.input_batch import AttentionPlan, LayerKind, Run, StepInputs
from engine.mlx_backend.kernels.tiling import KV_GROUP, SCALE_AND_BIAS_BYTES


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps per position. ``window``: positions seen by a token, itself included; None = all."""

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    window: int | None = None

    @property
    def values_per_token(self) -> int:
        """Numbers kept per position, keys and values together."""
        return self.num_kv_heads * (self.k_head_dim + self.v_head_dim)

    def bytes_per_token(self, dtype: mx.Dtype, kv_bits: int | None = None) -> int:
        """Pool bytes per position: numbers of ``dtype``, or of ``kv_bits`` bits with their scales."""
        if kv_bits is None:
            return self.values_per_token * dtype.size
        return self.values_per_token * kv_bits // 8 + self.values_per_token // KV_GROUP * SCALE_AND_BIAS_BYTES

    @property
    def kind(self) -> LayerKind:
        """What this layer's index arrays depend on."""
        return LayerKind(self.num_kv_heads, self.window)


class LayerPool:
    """Keys and values of one layer for all blocks, read as ``dtype``."""

    def __init__(self, shape: LayerShape, num_blocks: int, block_size: int, dtype: mx.Dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.block_size = block_size
        self._rows = (num_blocks + 1) * block_size
        self.keys = mx.zeros((shape.num_kv_heads * self._rows, shape.k_head_dim), dtype)
        self.values = mx.zeros((shape.num_kv_heads * self._rows, shape.v_head_dim), dtype)

    def arrays(self) -> list[mx.array]:
        """All that is held, to be evaluated with a step."""
        return [self.keys, self.values]

    def write(self, keys: mx.array, values: mx.array, write_index: mx.array) -> None:
        """Store keys and values ``[T, kv_heads, 1, head_dim]`` at flat rows ``write_index`` ``[T, kv_heads]``."""
        self.keys[write_index] = keys.squeeze(2).astype(self.keys.dtype)
        if self.shape.v_head_dim:
            self.values[write_index] = values.squeeze(2).astype(self.values.dtype)

    def gather(self, block_index: mx.array) -> tuple[mx.array, mx.array]:
        """Blocks ``[B, kv_heads, n]`` (head offsets included) -> keys, values ``[B, kv_heads, positions, dim]``."""
        return (
            self._gather(self.keys, self.shape.k_head_dim, block_index),
            self._gather(self.values, self.shape.v_head_dim, block_index),
        )

    def _gather(self, array: mx.array, head_dim: int, block_index: mx.array) -> mx.array:
        B, H, n = block_index.shape
        if head_dim == 0:  # a layer that keeps keys alone
            return mx.zeros((B, H, n * self.block_size, 0), array.dtype)
        blocks = mx.take(array.reshape(-1, self.block_size * head_dim), block_index, axis=0)
        return blocks.reshape(B, H, n * self.block_size, head_dim)

    def read(self, source: Run | mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values ``[B, kv_heads, positions, head_dim]`` of a run (a view, B = 1) or of gathered blocks."""
        if isinstance(source, Run):
            heads, span = self.shape.num_kv_heads, slice(source.first, source.first + source.count)
            return (
                self.keys.reshape(1, heads, self._rows, self.shape.k_head_dim)[:, :, span],
                self.values.reshape(1, heads, self._rows, self.shape.v_head_dim)[:, :, span],
            )
        return self.gather(source)

    def read_blocks(self, blocks: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Keys and values ``[kv_heads, positions, head_dim]`` of ``blocks`` in the order of their table."""
        heads = np.arange(self.shape.num_kv_heads)[:, None] * (self._rows // self.block_size)
        keys, values = self.gather(mx.array((heads + np.array(blocks)).astype(np.int32))[None])
        return keys[0], values[0]

    def copy_blocks(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """Copy whole blocks, all read before any is written."""
        source_rows, target_rows = mx.array(self._block_rows(sources)), mx.array(self._block_rows(targets))
        self.keys[target_rows] = self.keys[source_rows]
        self.values[target_rows] = self.values[source_rows]

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Set whole blocks to zero."""
        rows = mx.array(self._block_rows(np.array(blocks)))
        self.keys[rows] = 0.0
        self.values[rows] = 0.0

    def _block_rows(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        heads = np.arange(self.shape.num_kv_heads)[:, None, None] * self._rows
        rows = heads + blocks[None, :, None] * self.block_size + np.arange(self.block_size)
        return rows.reshape(-1).astype(np.int32)


class StepHolder:
    """The step that the layers of a model compute now. One object per model, shared by its caches."""

    __slots__ = ("inputs",)

    def __init__(self) -> None:
        self.inputs: StepInputs | None = None


class PagedLayerCache:
    """What a model's layer sees as its cache: per-token offsets in, written pool and attention out."""

    def __init__(self, pool: LayerPool, holder: StepHolder, max_model_len: int) -> None:
        self.pool = pool
        self.num_attends = 0
        self._latest: tuple[mx.array, mx.array] | None = None
        self._kind = pool.shape.kind
        self._holder = holder
        self._max_model_len = max_model_len

    @property
    def offset(self) -> mx.array:
        """Position of every token of the step, ``[T]``: every token is a batch row of its own."""
        return self._inputs.positions

    def make_mask(self, num_tokens: int = 1, return_array: bool = False, window_size: int | None = None) -> None:
        """No mask: attention knows the lengths. Raises UnsupportedModelError for a window the pool does not know."""
        window = self.pool.shape.window
        if window_size is not None and window_size < self._max_model_len and window_size != window:
            raise UnsupportedModelError(
                f"The model masks a window of {window_size} tokens over a cache that keeps {window or 'all'} of them.",
                "choose another model, or set max_model_len to at most that window",
            )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the step's keys and values, and hand them back unchanged: attention reads the pool."""
        self.pool.write(keys, values, self._plan.write_index)
        self._latest = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """For a layer that shares another's keys and values: the step's own, as ``update_and_fetch`` gave them."""
        assert self._latest is not None, "a layer shares keys and values that are not there yet"
        return self._latest

    def forget(self) -> None:
        """The step's graph is built: only it holds the step's arrays from now on, so that they go as it is computed."""
        self._latest = None

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attention of ``queries`` ``[T, heads, 1, head_dim]``, each over its own request's positions."""
        self.num_attends += 1
        return attend(self.pool, self._plan, queries, scale, sinks)

    @property
    def _inputs(self) -> StepInputs:
        assert self._holder.inputs is not None, "a paged cache is used outside a step"
        return self._holder.inputs

    @property
    def _plan(self) -> AttentionPlan:
        return self._inputs.plans[self._kind]
