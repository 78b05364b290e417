"""What each kernel computes, in plain MLX operations: slow, functional (pools go in and come out), and readable.

Owns: the meaning of the kernels. Must not know: how a kernel computes it.

Positions that a row does not see may hold anything, NaN included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.mlx_backend.kernels.rotating import Heads
from engine.mlx_backend.kernels.tiling import KV_GROUP, Geometry

# MLX's least step between two codes.
_LEAST_STEP = 1e-7


@dataclass(slots=True)
class HeldPool:
    """A layer's keys and values as its pool holds them, arrays of ``[kv_heads * pool_rows, width]``: one each, or with
    ``kv_bits`` three each (codes, scales, biases)."""

    keys: list[mx.array]
    values: list[mx.array]
    kv_bits: int | None = None

    @classmethod
    def of(cls, keys: mx.array, values: mx.array, dtype: mx.Dtype, kv_bits: int | None = None) -> HeldPool:
        """A pool that holds these numbers."""
        return cls(hold(keys, dtype, kv_bits), hold(values, dtype, kv_bits), kv_bits)

    def arrays(self) -> list[mx.array]:
        """All of the keys, then all of the values."""
        return [*self.keys, *self.values]

    def copy(self) -> HeldPool:
        """The same numbers in memory of their own."""
        copied = self.changed(mx.array)
        mx.eval(copied.arrays())
        return copied

    def changed(self, change: Callable[[mx.array], mx.array]) -> HeldPool:
        """``change`` of every array."""
        return HeldPool([change(x) for x in self.keys], [change(x) for x in self.values], self.kv_bits)

    def numbers(self) -> tuple[mx.array, mx.array]:
        """Keys and values ``[kv_heads * pool_rows, head_dim]`` in fp32."""
        return _read(self.keys, self.kv_bits), _read(self.values, self.kv_bits)


def hold(numbers: mx.array, dtype: mx.Dtype, kv_bits: int | None) -> list[mx.array]:
    """``numbers`` [..., D] as a pool holds them: of ``dtype``, or in MLX's affine form of ``kv_bits`` bits.

    What ``mx.quantize`` does on the CPU, operation by operation: on GPUs it rounds differently in places.
    """
    if kv_bits is None:
        return [numbers.astype(dtype)]
    most, per_word = 2**kv_bits - 1, 32 // kv_bits
    groups = numbers.astype(mx.float32).reshape(*numbers.shape[:-1], -1, KV_GROUP)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    step = mx.maximum((high - low) / most, _LEAST_STEP)
    from_low = mx.abs(low) > mx.abs(high)
    edge, step = mx.where(from_low, low, high), mx.where(from_low, step, -step)
    num_steps = mx.round(edge / step)
    scales = mx.where(num_steps == 0, step, edge / mx.where(num_steps == 0, 1.0, num_steps))
    biases = mx.where(num_steps == 0, 0.0, edge)
    codes = mx.clip(mx.round((groups - biases) / scales), 0, most).astype(mx.uint32)
    codes = codes.reshape(*numbers.shape[:-1], -1, per_word)
    words = mx.sum(codes << (mx.arange(per_word, dtype=mx.uint32) * kv_bits), axis=-1).astype(mx.uint32)
    return [words, scales[..., 0].astype(mx.float16), biases[..., 0].astype(mx.float16)]


def _read(held: list[mx.array], kv_bits: int | None) -> mx.array:
    if kv_bits is None:
        return held[0].astype(mx.float32)
    words, scales, biases = held
    per_word = 32 // kv_bits
    codes = (words[..., None] >> (mx.arange(per_word, dtype=mx.uint32) * kv_bits)) & (2**kv_bits - 1)
    groups = codes.astype(mx.float32).reshape(*words.shape[:-1], -1, KV_GROUP)
    numbers: mx.array = groups * scales[..., None].astype(mx.float32) + biases[..., None].astype(mx.float32)
    return numbers.reshape(*words.shape[:-1], -1)


def decode(
    geometry: Geometry,
    queries: mx.array,
    k_new: mx.array,
    v_new: mx.array,
    pool: HeldPool,
    block_table: mx.array,
    seq_lens: mx.array,
    sinks: mx.array | None = None,
) -> tuple[mx.array, HeldPool]:
    """``PagedKernels.decode`` in fp32. Returns the result [B, heads, 1, D] and the pool."""
    g, (B, n) = geometry, block_table.shape
    position = mx.arange(n * g.block_size)
    place = mx.repeat(block_table, g.block_size, axis=1) * g.block_size + position % g.block_size
    targets = mx.where(seq_lens > 0, mx.take_along_axis(place, mx.maximum(seq_lens - 1, 0)[:, None], 1)[:, 0], -1)
    pool = write(g, k_new, v_new, pool, targets)
    k_pool, v_pool = pool.numbers()
    seen = position[None] < seq_lens[:, None]
    if g.window:
        seen = seen & (position[None] >= seq_lens[:, None] - g.window)
    place = mx.where(seen, place, 0)
    visible = seen[:, None, :, None]
    keys = mx.where(visible, _at(g, k_pool, place), 0.0)
    values = mx.where(visible, _at(g, v_pool, place), 0.0)
    q = queries.astype(mx.float32).reshape(B, g.num_kv_heads, g.group, g.head_dim) * g.scale
    scores = q @ keys.swapaxes(-1, -2)
    if g.soft_cap:
        scores = mx.tanh(scores / g.soft_cap) * g.soft_cap
    scores = mx.where(seen[:, None, None, :], scores, -1e30)
    if sinks is not None:
        sink = mx.broadcast_to(
            sinks.astype(mx.float32).reshape(g.num_kv_heads, g.group, 1), (B, g.num_kv_heads, g.group, 1)
        )
        weights = mx.softmax(mx.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    else:
        weights = mx.softmax(scores, axis=-1)
    out = mx.where((seq_lens > 0)[:, None, None, None], weights @ values, 0.0)
    return out.reshape(queries.shape), pool


def attend_chunks(
    geometry: Geometry,
    queries: mx.array,
    pool: HeldPool,
    block_table: mx.array,
    chunks: mx.array,
    sinks: mx.array | None = None,
) -> mx.array:
    """``PagedKernels.attend_chunks`` in fp32; rows of no chunk are zeros."""
    out = mx.zeros(queries.shape)
    # Numbers that were held once are held again as they are.
    read = HeldPool.of(*pool.numbers(), mx.float32)
    for chunk, (first, count, start) in enumerate(np.array(chunks).tolist()):
        if count == 0:
            continue
        # Token i of the chunk attends as a decode row of length start + i + 1 whose token is stored already.
        rows = mx.arange(first, first + count)
        places = start + mx.arange(count)
        table = mx.broadcast_to(block_table[chunk], (count, block_table.shape[1]))
        found = table[0][places // geometry.block_size] * geometry.block_size + places % geometry.block_size
        k_new, v_new = (_at(geometry, pool, found[None])[0].swapaxes(0, 1)[:, :, None] for pool in read.arrays())
        result, _ = decode(geometry, queries[rows], k_new, v_new, read, table, places + 1, sinks)
        out[rows] = result
    return out


def write(geometry: Geometry, k_new: mx.array, v_new: mx.array, pool: HeldPool, targets: mx.array) -> HeldPool:
    """``PagedKernels.write``. Returns the pool."""
    keep = [i for i, target in enumerate(np.array(targets)) if target >= 0]
    if not keep:
        return pool

    def written(arrays: list[mx.array], new: mx.array) -> list[mx.array]:
        rows = _rows(geometry, arrays[0], targets[mx.array(keep)][None])
        held = hold(new[mx.array(keep)].squeeze(2).swapaxes(0, 1), arrays[0].dtype, pool.kv_bits)
        return [_put(array, rows, part) for array, part in zip(arrays, held, strict=True)]

    return HeldPool(written(pool.keys, k_new), written(pool.values, v_new), pool.kv_bits)


def gather(
    geometry: Geometry, pool: HeldPool, block_table: mx.array, span: mx.array, num_positions: int
) -> list[mx.array]:
    """``PagedKernels.gather`` in fp32: keys and values [1, kv_heads, num_positions, D]."""
    first, last = int(span[0]), int(span[1])
    position = first + mx.arange(num_positions)
    real = position < last
    size = geometry.block_size
    block = block_table[mx.where(real, position // size, first // size)]
    found = (_at(geometry, numbers, (block * size + position % size)[None]) for numbers in pool.numbers())
    return [mx.where(real[None, None, :, None], numbers, 0.0) for numbers in found]


def copy_blocks(geometry: Geometry, pool: HeldPool, pairs: mx.array) -> HeldPool:
    """``PagedKernels.copy_blocks``. Returns the pool."""
    places = pairs[:, :, None] * geometry.block_size + mx.arange(geometry.block_size)
    sources = _rows(geometry, pool.keys[0], places[:, 0].reshape(1, -1))
    targets = _rows(geometry, pool.keys[0], places[:, 1].reshape(1, -1))
    return pool.changed(lambda array: _put(array, targets, array[sources]))


def rotate(
    joined: mx.array, positions: mx.array, frequencies: mx.array, heads: Heads
) -> tuple[mx.array, mx.array, mx.array]:
    """``RotationKernel`` in fp32."""
    H, KV = heads.num_heads, heads.num_kv_heads
    rows = joined.astype(mx.float32).reshape(joined.shape[0], H + 2 * KV, 1, heads.dim)
    angles = positions.astype(mx.float32)[:, None, None, None] * frequencies
    low, high = mx.split(rows[:, : H + KV], 2, axis=-1)
    turned = mx.concatenate(
        [low * mx.cos(angles) - high * mx.sin(angles), low * mx.sin(angles) + high * mx.cos(angles)], axis=-1
    )
    return turned[:, :H], turned[:, H:], rows[:, H + KV :]


def add_norm(x: mx.array, y: mx.array, weight: mx.array, epsilon: float) -> tuple[mx.array, mx.array]:
    """``AddNormKernel``: the sum in the inputs' numbers, its norm in fp32."""
    total = x + y
    numbers = total.astype(mx.float32)
    scale = mx.rsqrt(mx.mean(numbers * numbers, axis=-1, keepdims=True) + epsilon)
    return total, numbers * scale * weight.astype(mx.float32)


def _rows(geometry: Geometry, pool: mx.array, places: mx.array) -> mx.array:
    """Places int32 [B, S] -> rows of the pool [B, kv_heads, S], without the first axis where B is 1."""
    heads = mx.arange(geometry.num_kv_heads)[:, None] * (pool.shape[0] // geometry.num_kv_heads)
    rows = places[:, None, :] + heads
    return rows[0] if places.shape[0] == 1 else rows


def _at(geometry: Geometry, pool: mx.array, places: mx.array) -> mx.array:
    """Places [B, S] -> numbers [B, kv_heads, S, D] in fp32."""
    B, S = places.shape
    rows = _rows(geometry, pool, places).reshape(B, geometry.num_kv_heads, S)
    return pool[rows].astype(mx.float32)


def _put(pool: mx.array, rows: mx.array, numbers: mx.array) -> mx.array:
    changed = mx.array(pool)
    changed[rows] = numbers.astype(pool.dtype)
    return changed
