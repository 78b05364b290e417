"""A layer's KV pool with 8 or 4 bits a number.

Owns: packing what is written and unpacking what is read, in MLX's affine groups of 32 along the head. Must not know:
how attention is computed: it gets numbers, as from the plain pool. What a step writes it also reads back packed, so a
token sees the same keys and values whether they were computed beside it, steps before, or for somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError
from engine.mlx_backend.input_batch import Run
from engine.mlx_backend.kernels.tiling import KV_GROUP
from engine.mlx_backend.paged_cache import LayerPool, LayerShape

_SCALE_DTYPE = mx.float16


def check_kv_bits(layers: Sequence[LayerShape], kv_bits: int | None) -> None:
    """Raise ConfigError when the layers' keys and values cannot be kept with ``kv_bits`` bits."""
    if kv_bits is None:
        return
    if not layers:
        raise ConfigError(f"`kv_bits` is {kv_bits}; this model's keys and values are in no pool.", "leave it out")
    for index, size in _unpackable(layers):
        raise ConfigError(
            f"`kv_bits` is {kv_bits}; layer {index} keeps vectors of {size} numbers, which are no whole groups "
            f"of {KV_GROUP}.",
            "leave `kv_bits` out",
        )


def possible_kv_bits(layers: Sequence[LayerShape]) -> tuple[int | None, ...]:
    """The kinds of pools that the layers' keys and values can be kept in; None: as they are."""
    return (None,) if any(_unpackable(layers)) else (None, 8, 4)


def _unpackable(layers: Sequence[LayerShape]) -> Iterator[tuple[int, int]]:
    """Yield each layer's vectors that are no whole groups: its index, and how many numbers they have."""
    for index, layer in enumerate(layers):
        for size in (layer.k_head_dim, layer.v_head_dim):
            if size % KV_GROUP:
                yield index, size


class QuantisedLayerPool(LayerPool):
    """As ``LayerPool``. ``dtype`` is what is read; what is held are codes with a half-precision scale and bias."""

    def __init__(self, shape: LayerShape, num_blocks: int, block_size: int, dtype: mx.Dtype, bits: int) -> None:
        self.shape, self.dtype = shape, dtype
        self.block_size = block_size
        self._rows = (num_blocks + 1) * block_size
        num_rows = shape.num_kv_heads * self._rows
        self._packed_keys = _PackedRows(num_rows, shape.k_head_dim, dtype, bits)
        self._packed_values = _PackedRows(num_rows, shape.v_head_dim, dtype, bits)
        # The codes, for who only has to tie the pool into a graph.
        self.keys, self.values = self._packed_keys.parts[0], self._packed_values.parts[0]

    def arrays(self) -> list[mx.array]:
        """All that is held."""
        return [*self._packed_keys.parts, *self._packed_values.parts]

    def write(self, keys: mx.array, values: mx.array, write_index: mx.array) -> None:
        """As ``LayerPool.write``."""
        self._packed_keys.write(keys.squeeze(2), write_index)
        self._packed_values.write(values.squeeze(2), write_index)

    def gather(self, block_index: mx.array) -> tuple[mx.array, mx.array]:
        """As ``LayerPool.gather``."""
        B, H, n = block_index.shape

        def blocks(array: mx.array) -> mx.array:
            width = array.shape[-1]
            taken = mx.take(array.reshape(-1, self.block_size * width), block_index, axis=0)
            return taken.reshape(B, H, n * self.block_size, width)

        return self._packed_keys.read(blocks), self._packed_values.read(blocks)

    def read(self, source: Run | mx.array) -> tuple[mx.array, mx.array]:
        """As ``LayerPool.read``; a run is unpacked, so it is no view."""
        if not isinstance(source, Run):
            return self.gather(source)
        span = slice(source.first, source.first + source.count)

        def run(array: mx.array) -> mx.array:
            return array.reshape(1, self.shape.num_kv_heads, self._rows, -1)[:, :, span]

        return self._packed_keys.read(run), self._packed_values.read(run)

    def copy_blocks(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """As ``LayerPool.copy_blocks``."""
        source_rows, target_rows = mx.array(self._block_rows(sources)), mx.array(self._block_rows(targets))
        for packed in (self._packed_keys, self._packed_values):
            for array in packed.parts:
                array[target_rows] = array[source_rows]

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """As ``LayerPool.clear_blocks``."""
        rows = mx.array(self._block_rows(np.array(blocks)))
        for packed in (self._packed_keys, self._packed_values):
            for array in packed.parts:
                array[rows] = 0


class _PackedRows:
    """Vectors of ``num_values`` numbers, one a row. ``parts``: codes, scales, biases."""

    def __init__(self, num_rows: int, num_values: int, dtype: mx.Dtype, bits: int) -> None:
        self._dtype, self._bits = dtype, bits
        widths = (num_values * bits // 32, num_values // KV_GROUP, num_values // KV_GROUP)
        dtypes = (mx.uint32, _SCALE_DTYPE, _SCALE_DTYPE)
        self.parts = [mx.zeros((num_rows, width), kind) for width, kind in zip(widths, dtypes, strict=True)]

    def write(self, vectors: mx.array, write_index: mx.array) -> None:
        if vectors.shape[-1] == 0:
            return
        # From fp32: a bf16 scale is wrong by half a code at the far end of 8 bits.
        packed = mx.quantize(vectors.astype(mx.float32), KV_GROUP, self._bits)
        for array, part in zip(self.parts, packed, strict=True):
            array[write_index] = part.astype(array.dtype)

    def read(self, take: Callable[[mx.array], mx.array]) -> mx.array:
        codes, scales, biases = (take(array) for array in self.parts)
        if codes.shape[-1] == 0:
            return codes.astype(self._dtype)
        if self._dtype == mx.float32:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(codes, scales, biases, KV_GROUP, self._bits).astype(self._dtype)
