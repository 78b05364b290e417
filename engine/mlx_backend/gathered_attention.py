"""Attention over gathered blocks with MLX's own operations: the CPU's road, and the reference for every kernel.

Owns: one call per group of equally long decode rows, one per chunk. Must not know: requests, models.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from engine.mlx_backend.input_batch import AttentionPlan, ChunkSpan, DecodeGroup


class GatherablePool(Protocol):
    """A layer's pool, as far as reading goes."""

    def gather(self, block_index: mx.array) -> tuple[mx.array, mx.array]:
        """Blocks ``[B, kv_heads, n]`` -> keys and values ``[B, kv_heads, n * block_size, head_dim]``."""
        ...


def attend(
    pool: GatherablePool, plan: AttentionPlan, queries: mx.array, scale: float, sinks: mx.array | None
) -> mx.array:
    """Attention of ``queries`` ``[T, heads, 1, head_dim]`` over what ``plan`` says, in the same shape."""
    outputs = [_attend_group(pool, group, queries, scale, sinks) for group in plan.groups]
    outputs += [_attend_chunk(pool, chunk, queries, scale, sinks) for chunk in plan.chunks]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)


def _attend_group(
    pool: GatherablePool, group: DecodeGroup, queries: mx.array, scale: float, sinks: mx.array | None
) -> mx.array:
    keys, values = pool.gather(group.blocks)
    rows = queries[group.first : group.first + group.count]
    return mx.fast.scaled_dot_product_attention(rows, keys, values, scale=scale, mask=group.valid, sinks=sinks)


def _attend_chunk(
    pool: GatherablePool, chunk: ChunkSpan, queries: mx.array, scale: float, sinks: mx.array | None
) -> mx.array:
    keys, values = pool.gather(chunk.blocks)
    rows = queries[chunk.first : chunk.first + chunk.count].transpose(2, 1, 0, 3)
    out = mx.fast.scaled_dot_product_attention(
        rows, keys[:, :, : chunk.num_keys], values[:, :, : chunk.num_keys], scale=scale, mask=chunk.mask, sinks=sinks
    )
    return out.transpose(2, 1, 0, 3)
