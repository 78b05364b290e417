"""Times kernels against the plain MLX operations that would stand in for them.

Owns: the work that is timed. Must not know: what is concluded from the times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from engine.mlx_backend.geometries import layer_geometries
from engine.mlx_backend.kernels.launch import KernelFactory
from engine.mlx_backend.kernels.paged_attention import PagedKernels
from engine.mlx_backend.kernels.sampling import SampleKernel
from engine.mlx_backend.kernels.tiling import Geometry, Tuning
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.paged_cache import LayerPool, LayerShape

_ROWS, _CONTEXT_TOKENS, _CHUNK_TOKENS, _BLOCK_SIZE_TOKENS = 8, 1024, 512, 16
_REPEATS = 7
_CALLS = 10  # queued together, so that the launch of one hides behind another


def compare_speeds(loaded: LoadedModel, factory: KernelFactory, tuning: Tuning) -> Iterator[tuple[str, float, float]]:
    """Name, seconds by the kernel and seconds in plain MLX, for the model's first kind of layer."""
    geometry = layer_geometries(loaded, _BLOCK_SIZE_TOKENS)[0]
    yield from _attention(geometry, loaded.compute_dtype, factory, tuning)
    yield _sampling(loaded.facts.vocab_size, loaded.compute_dtype, factory)


def _attention(
    geometry: Geometry, dtype: mx.Dtype, factory: KernelFactory, tuning: Tuning
) -> Iterator[tuple[str, float, float]]:
    g, kernels = geometry, PagedKernels(geometry, dtype, dtype, factory, tuning)
    blocks_per_row = _CONTEXT_TOKENS // g.block_size
    num_blocks = _ROWS * blocks_per_row
    pool = LayerPool(LayerShape(g.num_kv_heads, g.head_dim, g.head_dim), num_blocks, g.block_size, dtype)
    table = np.random.default_rng(0).permutation(num_blocks).reshape(_ROWS, blocks_per_row).astype(np.int32)
    heads = np.arange(g.num_kv_heads)[:, None] * (num_blocks + 1)
    block_index = mx.array((table[:, None, :] + heads).astype(np.int32))
    device_table, lengths = mx.array(table), mx.full((_ROWS,), _CONTEXT_TOKENS, mx.int32)
    queries = mx.random.normal((_ROWS, g.num_heads, 1, g.head_dim), dtype)
    new = mx.random.normal((_ROWS, g.num_kv_heads, 1, g.head_dim), dtype)

    def decode() -> list[mx.array]:
        version, outputs = mx.zeros((1,), mx.int32), []
        for _ in range(_CALLS):
            out, version = kernels.decode(queries, new, new, pool, device_table, lengths, version)
            outputs.append(out)
        return outputs

    def plain_decode() -> list[mx.array]:
        return [
            mx.fast.scaled_dot_product_attention(queries, *pool.gather(block_index), scale=g.scale)
            for _ in range(_CALLS)
        ]

    yield "decode attention, 8 x 1,024", _seconds(decode), _seconds(plain_decode)
    if not kernels.attends_chunks:
        return
    chunk_queries = mx.random.normal((_CHUNK_TOKENS, g.num_heads, 1, g.head_dim), dtype)
    start = _CONTEXT_TOKENS - _CHUNK_TOKENS
    chunks = mx.array([[0, _CHUNK_TOKENS, start]], mx.int32)

    def chunk() -> list[mx.array]:
        version, outputs = mx.zeros((1,), mx.int32), []
        for _ in range(_CALLS):
            out, version = kernels.attend_chunks(chunk_queries, pool, device_table[:1], chunks, version)
            outputs.append(out)
        return outputs

    def plain_chunk() -> list[mx.array]:
        rows = chunk_queries.transpose(2, 1, 0, 3)
        return [
            mx.fast.scaled_dot_product_attention(rows, *pool.gather(block_index[:1]), scale=g.scale, mask="causal")
            for _ in range(_CALLS)
        ]

    yield "chunk attention, 512 at 512", _seconds(chunk), _seconds(plain_chunk)


def _sampling(vocab_size: int, dtype: mx.Dtype, factory: KernelFactory) -> tuple[str, float, float]:
    kernel = SampleKernel(factory)
    logits = mx.random.normal((_ROWS, vocab_size), dtype)
    settings = mx.array(np.repeat(np.array([[0.8], [0.95], [0.0]], np.float32), _ROWS, axis=1))
    limits, keys = mx.full((_ROWS,), vocab_size, mx.int32), mx.zeros((2, _ROWS), mx.int32)

    def draw() -> list[mx.array]:
        return [kernel(logits, settings, limits, keys)[0] for _ in range(_CALLS)]

    def plain() -> list[mx.array]:
        return [_plain_top_p(logits) for _ in range(_CALLS)]

    return "top_p over the vocabulary, 8 rows", _seconds(draw), _seconds(plain)


def _plain_top_p(logits: mx.array) -> mx.array:
    """top_p by a whole sort, as one writes it in MLX."""
    scores = logits.astype(mx.float32) / 0.8
    order = mx.argsort(-scores, axis=-1)
    mass = mx.softmax(mx.take_along_axis(scores, order, axis=-1), axis=-1)
    kept = mx.cumsum(mass, axis=-1) - mass < 0.95
    choice = mx.random.categorical(mx.where(kept, mx.log(mass), -mx.inf))
    return mx.take_along_axis(order, choice[:, None], axis=-1)[:, 0]


def _seconds(work: Callable[[], list[mx.array]]) -> float:
    mx.eval(work())
    durations_s = []
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        mx.eval(work())
        durations_s.append(time.perf_counter() - started_s)
    return statistics.median(durations_s) / _CALLS
