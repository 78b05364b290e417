"""What each kernel computes, in plain MLX operations: slow, functional (pools go in and come out), and readable.

Owns: the meaning of the kernels. Must not know: how a kernel computes it.

Pools are ``[kv_heads * pool_rows, head_dim]``; positions that a row does not see may hold anything, NaN included.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from engine.mlx_backend.kernels.rotating import Heads
from engine.mlx_backend.kernels.tiling import Geometry


def decode(
    geometry: Geometry,
    queries: mx.array,
    k_new: mx.array,
    v_new: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    block_table: mx.array,
    seq_lens: mx.array,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """``PagedKernels.decode`` in fp32. Returns the result [B, heads, 1, D] and both pools."""
    g, (B, n) = geometry, block_table.shape
    position = mx.arange(n * g.block_size)
    place = mx.repeat(block_table, g.block_size, axis=1) * g.block_size + position % g.block_size
    targets = mx.where(seq_lens > 0, mx.take_along_axis(place, mx.maximum(seq_lens - 1, 0)[:, None], 1)[:, 0], -1)
    k_pool = write(g, k_new, k_pool, targets)
    v_pool = write(g, v_new, v_pool, targets)
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
    return out.reshape(queries.shape), k_pool, v_pool


def attend_chunks(
    geometry: Geometry,
    queries: mx.array,
    k_pool: mx.array,
    v_pool: mx.array,
    block_table: mx.array,
    chunks: mx.array,
    sinks: mx.array | None = None,
) -> mx.array:
    """``PagedKernels.attend_chunks`` in fp32; rows of no chunk are zeros."""
    out = mx.zeros(queries.shape)
    for chunk, (first, count, start) in enumerate(np.array(chunks).tolist()):
        if count == 0:
            continue
        # Token i of the chunk attends as a decode row of length start + i + 1 whose token is stored already.
        rows = mx.arange(first, first + count)
        places = start + mx.arange(count)
        table = mx.broadcast_to(block_table[chunk], (count, block_table.shape[1]))
        found = table[0][places // geometry.block_size] * geometry.block_size + places % geometry.block_size
        k_new, v_new = (_at(geometry, pool, found[None])[0].swapaxes(0, 1)[:, :, None] for pool in (k_pool, v_pool))
        result, _, _ = decode(geometry, queries[rows], k_new, v_new, k_pool, v_pool, table, places + 1, sinks)
        out[rows] = result
    return out


def write(geometry: Geometry, new: mx.array, pool: mx.array, targets: mx.array) -> mx.array:
    """``PagedKernels.write`` of keys or values. Returns the pool."""
    keep = [i for i, target in enumerate(np.array(targets)) if target >= 0]
    if not keep:
        return pool
    rows = _rows(geometry, pool, targets[mx.array(keep)][None])
    return _put(pool, rows, new[mx.array(keep)].squeeze(2).swapaxes(0, 1))


def gather(geometry: Geometry, pool: mx.array, block_table: mx.array, span: mx.array, num_positions: int) -> mx.array:
    """``PagedKernels.gather`` of keys or values: [1, kv_heads, num_positions, D]."""
    first, last = int(span[0]), int(span[1])
    position = first + mx.arange(num_positions)
    real = position < last
    size = geometry.block_size
    block = block_table[mx.where(real, position // size, first // size)]
    found = _at(geometry, pool, (block * size + position % size)[None])
    return mx.where(real[None, None, :, None], found, 0.0)


def copy_blocks(geometry: Geometry, pool: mx.array, pairs: mx.array) -> mx.array:
    """``PagedKernels.copy_blocks`` of keys or values. Returns the pool."""
    places = pairs[:, :, None] * geometry.block_size + mx.arange(geometry.block_size)
    sources = _rows(geometry, pool, places[:, 0].reshape(1, -1))
    targets = _rows(geometry, pool, places[:, 1].reshape(1, -1))
    return _put(pool, targets, pool[sources])


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
