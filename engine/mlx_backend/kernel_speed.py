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
from engine.mlx_backend.paged_cache import LayerShape
from engine.mlx_backend.pools import make_pools
from engine.mlx_backend.quantised_pool import possible_kv_bits

_ROWS, _CONTEXT_TOKENS, _CHUNK_TOKENS, _BLOCK_SIZE_TOKENS = 8, 1024, 512, 16
_REPEATS = 7
_CALLS = 10  # queued together, so that the launch of one hides behind another


def compare_speeds(loaded: LoadedModel, factory: KernelFactory, tuning: Tuning) -> Iterator[tuple[str, float, float]]:
    """Name, seconds by the kernel and seconds in plain MLX, for the model's first kind of layer."""
    geometry = layer_geometries(loaded, _BLOCK_SIZE_TOKENS)[0]
    for kv_bits in possible_kv_bits(loaded.layers):
        yield from _attention(geometry, loaded.compute_dtype, factory, tuning, kv_bits)
    yield _sampling(loaded.facts.vocab_size, loaded.compute_dtype, factory)


def _attention(
    geometry: Geometry, dtype: mx.Dtype, factory: KernelFactory, tuning: Tuning, kv_bits: int | None
) -> Iterator[tuple[str, float, float]]:
    kernels = PagedKernels(geometry, dtype, dtype, factory, tuning, kv_bits)
    work = _Work(geometry, dtype, kv_bits)
    suffix = f", {kv_bits} bits" if kv_bits else ""
    yield (f"decode attention, 8 x 1,024{suffix}", *_decode(kernels, work))
    if kernels.attends_chunks:
        yield (f"chunk attention, 512 at 512{suffix}", *_chunk(kernels, work))


class _Work:
    """A pool, its rows' block tables in no order, and what the plain operations gather by."""

    def __init__(self, geometry: Geometry, dtype: mx.Dtype, kv_bits: int | None) -> None:
        g, blocks_per_row = geometry, _CONTEXT_TOKENS // geometry.block_size
        num_blocks = _ROWS * blocks_per_row
        shape = LayerShape(g.num_kv_heads, g.head_dim, g.head_dim)
        (self.pool,) = make_pools([shape], num_blocks, g.block_size, dtype, kv_bits)
        table = np.random.default_rng(0).permutation(num_blocks).reshape(_ROWS, blocks_per_row).astype(np.int32)
        heads = np.arange(g.num_kv_heads)[:, None] * (num_blocks + 1)
        self.table, self.block_index = mx.array(table), mx.array((table[:, None, :] + heads).astype(np.int32))
        self.dtype = dtype


def _decode(kernels: PagedKernels, work: _Work) -> tuple[float, float]:
    g, pool = kernels.geometry, work.pool
    lengths = mx.full((_ROWS,), _CONTEXT_TOKENS, mx.int32)
    queries = mx.random.normal((_ROWS, g.num_heads, 1, g.head_dim), work.dtype)
    new = mx.random.normal((_ROWS, g.num_kv_heads, 1, g.head_dim), work.dtype)

    def decode() -> list[mx.array]:
        version, outputs = mx.zeros((1,), mx.int32), []
        for _ in range(_CALLS):
            out, version = kernels.decode(queries, new, new, pool, work.table, lengths, version)
            outputs.append(out)
        return outputs

    def plain() -> list[mx.array]:
        return [
            mx.fast.scaled_dot_product_attention(queries, *pool.gather(work.block_index), scale=g.scale)
            for _ in range(_CALLS)
        ]

    return _seconds(decode), _seconds(plain)


def _chunk(kernels: PagedKernels, work: _Work) -> tuple[float, float]:
    g, pool = kernels.geometry, work.pool
    queries = mx.random.normal((_CHUNK_TOKENS, g.num_heads, 1, g.head_dim), work.dtype)
    chunks = mx.array([[0, _CHUNK_TOKENS, _CONTEXT_TOKENS - _CHUNK_TOKENS]], mx.int32)

    def chunk() -> list[mx.array]:
        version, outputs = mx.zeros((1,), mx.int32), []
        for _ in range(_CALLS):
            out, version = kernels.attend_chunks(queries, pool, work.table[:1], chunks, version)
            outputs.append(out)
        return outputs

    def plain() -> list[mx.array]:
        rows = queries.transpose(2, 1, 0, 3)
        return [
            mx.fast.scaled_dot_product_attention(rows, *pool.gather(work.block_index[:1]), scale=g.scale, mask="causal")
            for _ in range(_CALLS)
        ]

    return _seconds(chunk), _seconds(plain)


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
