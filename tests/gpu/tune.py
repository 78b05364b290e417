"""``python -m tests.gpu.tune``: times the kernels' tilings on this machine's GPU, for whoever sets kernels/tiling.py.

Llama 3 8B's shapes in bf16. Calls are queued in chains; weights are rotated, so that none is in the cache when it is
read. Every section prints the tree's own choice first.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from engine.mlx_backend.kernels.launch import KernelFactory, gpu_factory, gpu_target
from engine.mlx_backend.kernels.paged_attention import PagedKernels
from engine.mlx_backend.kernels.projecting import TILINGS, ProjectionKernel
from engine.mlx_backend.kernels.tiling import TUNINGS, Geometry, Tuning
from engine.mlx_backend.paged_cache import LayerPool, LayerShape
from tests.gpu.kernel_times import record

GEOMETRY = Geometry(32, 8, 128, 16, 128**-0.5)
PRODUCTS = {
    "query, key, value": (6144, 4096),
    "output": (4096, 4096),
    "gate, up": (28_672, 4096),
    "down": (4096, 14_336),
}
TILES = [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4)]
_ROTATED_BYTES = 400 * 2**20
_CALLS = 32


def seconds(work: Callable[[], list[mx.array]], calls: int) -> float:
    """Time that the GPU spends on one of the ``calls`` that ``work`` queues; the wall's where it cannot be recorded."""
    mx.eval(work())
    try:
        runs = record(lambda: mx.eval(work()))
        return sum(run.end_ns - run.start_ns for run in runs) / 1e9 / calls
    except ImportError:
        started_s = time.perf_counter()
        mx.eval(work())
        return (time.perf_counter() - started_s) / calls


def products(factory: KernelFactory) -> Iterator[str]:
    """Products of few rows: MLX's, and the kernel's by tiles of features and runs a turn."""
    for name, (N, K) in PRODUCTS.items():
        weights = [mx.random.normal((N, K), mx.bfloat16) for _ in range(max(2, _ROTATED_BYTES // (N * K * 2)))]
        mx.eval(weights)
        for rows in (8, 16, 32):
            x = mx.random.normal((rows, 1, K), mx.bfloat16)

            def plain(x: mx.array = x, weights: list[mx.array] = weights) -> list[mx.array]:
                return [x @ weight.T for weight in weights]

            times = {"MLX": seconds(plain, len(weights))}
            padded = next(padded for padded in TILINGS if padded >= rows)
            for tile in dict.fromkeys([TILINGS[padded], *TILES]):
                if N % (16 * tile[0]) or K % (32 * tile[1]):
                    continue
                kernel = ProjectionKernel(factory, {padded: tile})

                def ours(
                    x: mx.array = x, weights: list[mx.array] = weights, kernel: ProjectionKernel = kernel
                ) -> list[mx.array]:
                    return [kernel(x, weight) for weight in weights]

                times[str(tile)] = seconds(ours, len(weights))
            yield f"{name}, {rows} rows, us: " + _listed(times) + f"; floor {N * K * 2 / 4.3e12 * 1e6:.0f}"


def decode(factory: KernelFactory) -> Iterator[str]:
    """Decode attention by how it is cut."""
    base = TUNINGS["cuda"]
    changes: list[dict[str, int]] = [
        {},
        *({"target_groups": groups} for groups in (264, 528, 2048)),
        {"longest_span": 1024},
        {"loaded_bytes": 64},
        {"loaded_bytes": 256},
        {"simds": 2, "target_groups": 2048},
    ]
    changes += [{**change, "loads_ahead": 1 - base.loads_ahead} for change in changes]
    for rows, context in ((1, 576), (4, 576), (8, 576), (16, 576), (32, 576), (8, 8192), (4, 32_768), (1, 32_768)):
        # As many pools as keep each other out of the cache, like a model's layers.
        pools = [_pool(rows, context) for _ in range(max(2, _ROTATED_BYTES // (rows * context * 4096)))]
        queries = mx.random.normal((rows, 32, 1, 128), mx.bfloat16)
        new = mx.random.normal((rows, 8, 1, 128), mx.bfloat16)
        lengths, times = mx.full((rows,), context, mx.int32), {}
        for change in changes:
            kernels = PagedKernels(GEOMETRY, mx.bfloat16, mx.bfloat16, factory, _changed(base, change))

            def chain(
                kernels: PagedKernels = kernels,
                queries: mx.array = queries,
                new: mx.array = new,
                pools: list[tuple[LayerPool, mx.array]] = pools,
                lengths: mx.array = lengths,
            ) -> list[mx.array]:
                version, outputs = mx.zeros((1,), mx.int32), []
                for call in range(_CALLS):
                    pool, table = pools[call % len(pools)]
                    out, version = kernels.decode(queries, new, new, pool, table, lengths, version)
                    outputs.append(out)
                return outputs

            times[str(change or "as it is")] = seconds(chain, _CALLS)
        yield f"decode attention {rows} x {context}, us: " + _listed(times)


def chunks(factory: KernelFactory) -> Iterator[str]:
    """Chunk attention of few and many tokens at short and long contexts, by how it is cut."""
    changes: list[dict[str, int]] = [
        {},
        {"chunk_groups": 0},
        {"chunk_groups": 264},
        {"chunk_keys": 64},
        {"chunk_keys": 64, "chunk_groups": 264},
        {"chunk_keys": 64, "chunk_simds": 4, "chunk_groups": 264},
    ]
    for start in (0, 2048, 8192, 15_872):
        pool, table = _pool(1, start + 512)
        for count in (64, 128, 192, 256, 320, 512):
            queries, times = mx.random.normal((count, 32, 1, 128), mx.bfloat16), {}
            for change in changes:
                kernels = PagedKernels(GEOMETRY, mx.bfloat16, mx.bfloat16, factory, _changed(TUNINGS["cuda"], change))
                spans = mx.array([[0, count, start]], mx.int32)

                def chain(
                    kernels: PagedKernels = kernels,
                    queries: mx.array = queries,
                    pool: LayerPool = pool,
                    table: mx.array = table,
                    spans: mx.array = spans,
                ) -> list[mx.array]:
                    version, outputs = mx.zeros((1,), mx.int32), []
                    for _ in range(16):
                        out, version = kernels.attend_chunks(queries, pool, table, spans, version)
                        outputs.append(out)
                    return outputs

                times[str(change or "as it is")] = seconds(chain, 16)
            yield f"chunk attention, {count} tokens at {start}, us: " + _listed(times)


def _changed(tuning: Tuning, change: dict[str, int]) -> Tuning:
    return dataclasses.replace(tuning, **change)  # type: ignore[arg-type]


def _pool(rows: int, context: int) -> tuple[LayerPool, mx.array]:
    """A pool of random numbers and the rows' block tables in no order."""
    blocks_per_row = -(-context // GEOMETRY.block_size)
    num_blocks = rows * blocks_per_row
    pool = LayerPool(LayerShape(8, 128, 128), num_blocks, GEOMETRY.block_size, mx.bfloat16)
    pool.keys = mx.random.normal(pool.keys.shape, mx.bfloat16)
    pool.values = mx.random.normal(pool.values.shape, mx.bfloat16)
    table = mx.array(np.random.default_rng(0).permutation(num_blocks).reshape(rows, -1).astype(np.int32))
    mx.eval(pool.keys, pool.values, table)
    return pool, table


def _listed(times_s: dict[str, float]) -> str:
    return ", ".join(f"{name} {time_s * 1e6:.1f}" for name, time_s in times_s.items())


SECTIONS = {function.__name__: function for function in (products, decode, chunks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    target = gpu_target()
    assert target is not None, "needs a GPU"
    for name in parser.parse_args().only:
        for line in SECTIONS[name](gpu_factory(target)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
