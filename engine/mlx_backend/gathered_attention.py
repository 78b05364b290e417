"""Attention over a paged pool with MLX's own operations: the CPU's road, and every GPU's where kernels are off.

Owns: one call per part of a plan. Must not know: requests, models, how a plan is made.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from engine.mlx_backend import cpu_attention
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
    on_cpu = mx.default_device().type == mx.cpu
    outputs = [_attend_rows(pool, part, queries, scale, sinks, on_cpu) for part in plan.decodes]
    outputs += [_attend_chunk(pool, part, queries, scale, sinks, on_cpu) for part in plan.chunks]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)


def _attend_rows(
    pool: ReadablePool, part: DecodePart, queries: mx.array, scale: float, sinks: mx.array | None, on_cpu: bool
) -> mx.array:
    keys, values = pool.read(part.source)
    rows = queries[part.first : part.first + part.count]
    if on_cpu:
        return cpu_attention.attend_rows(rows, keys, values, scale, part.valid, sinks)
    return mx.fast.scaled_dot_product_attention(rows, keys, values, scale=scale, mask=part.valid, sinks=sinks)


def _attend_chunk(
    pool: ReadablePool, part: ChunkPart, queries: mx.array, scale: float, sinks: mx.array | None, on_cpu: bool
) -> mx.array:
    keys, values = (array[:, :, : part.num_keys] for array in pool.read(part.source))
    rows = queries[part.first : part.first + part.count].transpose(2, 1, 0, 3)
    if on_cpu:
        out = cpu_attention.attend_chunk(rows, keys, values, scale, part.mask, sinks)
    else:
        mask = "causal" if part.mask is None else part.mask
        out = mx.fast.scaled_dot_product_attention(rows, keys, values, scale=scale, mask=mask, sinks=sinks)
    return out.transpose(2, 1, 0, 3)
