"""Attention over a paged pool with MLX's own operations: the CPU's road, and the reference for every kernel.

Owns: one call per part of a plan. Must not know: requests, models, how a plan is made.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from engine.mlx_backend.input_batch import AttentionPlan, ChunkPart, DecodePart, Run


class ReadablePool(Protocol):
    """A layer's pool, as far as reading goes."""

    def read(self, source: Run | mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values ``[B, kv_heads, positions, head_dim]``."""
        ...


def attend(
    pool: ReadablePool, plan: AttentionPlan, queries: mx.array, scale: float, sinks: mx.array | None
) -> mx.array:
    """Attention of ``queries`` ``[T, heads, 1, head_dim]`` over what ``plan`` says, in the same shape."""
    outputs = [_attend_rows(pool, part, queries, scale, sinks) for part in plan.decodes]
    outputs += [_attend_chunk(pool, part, queries, scale, sinks) for part in plan.chunks]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)


def _attend_rows(
    pool: ReadablePool, part: DecodePart, queries: mx.array, scale: float, sinks: mx.array | None
) -> mx.array:
    keys, values = pool.read(part.source)
    rows = queries[part.first : part.first + part.count]
    if sinks is not None:  # one per query head: the heads must stay apart
        return mx.fast.scaled_dot_product_attention(rows, keys, values, scale=scale, mask=part.valid, sinks=sinks)
    # The query heads that share a KV head become its rows: one product each instead of one per query head.
    B, H, _, D = rows.shape
    kv_heads = keys.shape[1]
    rows = rows.reshape(B, kv_heads, H // kv_heads, D)
    out = mx.fast.scaled_dot_product_attention(rows, keys, values, scale=scale, mask=part.valid)
    return out.reshape(B, H, 1, values.shape[-1])


def _attend_chunk(
    pool: ReadablePool, part: ChunkPart, queries: mx.array, scale: float, sinks: mx.array | None
) -> mx.array:
    keys, values = pool.read(part.source)
    rows = queries[part.first : part.first + part.count].transpose(2, 1, 0, 3)
    out = mx.fast.scaled_dot_product_attention(
        rows, keys[:, :, : part.num_keys], values[:, :, : part.num_keys], scale=scale, mask=part.mask, sinks=sinks
    )
    return out.transpose(2, 1, 0, 3)
