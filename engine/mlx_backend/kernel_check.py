"""Runs every kernel on small random inputs against its plain-MLX reference, on the machine that will use it.

Owns: the trials (parity of each kernel, order of pool accesses) and their verdicts. Must not know: models, steps, what
is done about a failure.

Nobody promises that a write through a cast pointer is seen by the next kernel, by the next step, and by a step that was
started before the last one ended: the order trials ask for exactly that, with results that differ if one is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.mlx_backend.gpu_cache import KernelBook
from engine.mlx_backend.kernels import reference
from engine.mlx_backend.kernels.launch import KernelFactory
from engine.mlx_backend.kernels.norming import AddNormKernel
from engine.mlx_backend.kernels.projecting import ProjectionKernel
from engine.mlx_backend.kernels.reference import HeldPool
from engine.mlx_backend.kernels.rotating import Heads, RotationKernel
from engine.mlx_backend.kernels.sampling import SampleKernel
from engine.mlx_backend.kernels.tiling import LEAST_CHUNK_SPAN, Geometry
from engine.mlx_backend.noise import gumbel

# Largest error in units of 1 + |result|: several times the spacing of the type's numbers. A wrong block gives 0.1.
_TOLERANCES = {mx.float32: 1e-3, mx.float16: 5e-3, mx.bfloat16: 3e-2}
_LENGTHS = (1, 0, 37, 200)
_WIDENING = 5
_ORDER_STEPS = 12
_VOCAB_SIZE_TOKENS = 3001

# Kernels that can be turned off alone.
SAMPLING, CHUNK_ATTENTION, PROJECTIONS = "sampling", "chunk attention", "projections"
ROTATION, NORMS = "rotation", "residual norms"
OPTIONAL = frozenset({SAMPLING, CHUNK_ATTENTION, PROJECTIONS, ROTATION, NORMS})

Arrays = Sequence[mx.array]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``problem`` is empty when the kernel did what its reference does; ``error`` is the largest difference."""

    name: str
    problem: str
    error: float


class Trials:
    """All trials for layers of one ``geometry`` and pools as ``book`` has them."""

    def __init__(self, geometry: Geometry, dtype: mx.Dtype, pool_dtype: mx.Dtype, book: KernelBook) -> None:
        self.geometry, self.dtype = geometry, dtype
        self._kernels = book.kernels(geometry, dtype, pool_dtype)
        self._random = np.random.default_rng(1)
        g = geometry
        B, width = len(_LENGTHS), -(-max(_LENGTHS) // g.block_size)
        num_blocks = B * width
        rows = (num_blocks + 1) * g.block_size
        keys, values = (self._draw(g.num_kv_heads * rows, g.head_dim) for _ in range(2))
        self._pool = HeldPool.of(keys, values, pool_dtype, book.kv_bits)
        self._table = mx.array(self._random.permutation(num_blocks).reshape(B, width).astype(np.int32))
        self._lengths = mx.array(np.array(_LENGTHS, np.int32))
        self._queries = self._draw(B, g.num_heads, 1, g.head_dim)
        self._new = self._draw(B, g.num_kv_heads, 1, g.head_dim), self._draw(B, g.num_kv_heads, 1, g.head_dim)
        self._sinks = self._draw(g.num_heads) if g.has_sinks else None

    def run(self) -> Iterator[Verdict]:
        """Verdicts one by one; an exception (a compiler's, say) is a verdict too."""
        trials = {
            "paged decode attention": self._decode,
            "chunk write": self._write,
            "chunk gather": self._gather,
            CHUNK_ATTENTION: self._attend_chunks,
            "block copy": self._copy_blocks,
            "order of pool accesses": self._order,
        }
        if not (self._kernels.attends_chunks and self._kernels.tuning.pages_chunks):
            del trials[CHUNK_ATTENTION]
        for name, trial in trials.items():
            yield judge(name, trial, _TOLERANCES[self.dtype])

    def _draw(self, *shape: int) -> mx.array:
        return mx.array(self._random.standard_normal(shape).astype(np.float32)).astype(self.dtype)

    def _decode(self) -> tuple[Arrays, Arrays]:
        """Three widths of table: a context in one split, in a few, and in many of which most are unused."""
        results: list[mx.array] = []
        wanted: list[mx.array] = []
        one_split = max(1, self._kernels.tiling.least // self.geometry.block_size)
        wide = mx.concatenate([self._table, *[mx.zeros_like(self._table)] * _WIDENING], axis=1)
        for table in (self._table[:, :one_split], self._table, wide):
            lengths = mx.minimum(self._lengths, table.shape[1] * self.geometry.block_size)
            pool = self._pool.copy()
            inputs = (self._queries, *self._new)
            out, version = self._kernels.decode(*inputs, pool, table, lengths, mx.zeros((1,), mx.int32), self._sinks)
            mx.eval(out, version)
            wanted_out, wanted_pool = reference.decode(self.geometry, *inputs, self._pool, table, lengths, self._sinks)
            results += [out, *pool.numbers()]
            wanted += [wanted_out, *wanted_pool.numbers()]
        return results, wanted

    def _write(self) -> tuple[Arrays, Arrays]:
        g = self.geometry
        new = self._draw(9, g.num_kv_heads, 1, g.head_dim)
        targets = mx.array([3, -1, 9, 8, 40, 41, 42, -1, 0], mx.int32)
        pool = self._pool.copy()
        mx.eval(self._kernels.write(new, new, pool, targets, mx.zeros((1,), mx.int32)))
        return pool.numbers(), reference.write(g, new, new, self._pool, targets).numbers()

    def _gather(self) -> tuple[Arrays, Arrays]:
        table, span = self._table[3], mx.array([self.geometry.block_size, 150, 160], mx.int32)
        keys, values, _ = self._kernels.gather(self._pool, table, span, 160, mx.zeros((1,), mx.int32))
        return [keys, values], reference.gather(self.geometry, self._pool, table, span, 160)

    def _attend_chunks(self) -> tuple[Arrays, Arrays]:
        """A table so narrow that contexts are whole, and one whose contexts are split where the chip has room."""
        g, results, wanted = self.geometry, [], []
        queries = self._draw(60, g.num_heads, 1, g.head_dim)
        narrow = max(1, LEAST_CHUNK_SPAN // g.block_size)
        for start, table in ((narrow * g.block_size - 40, self._table[2:, :narrow]), (130, self._table[2:])):
            chunks, version = mx.array([[0, 20, 0], [20, 40, start]], mx.int32), mx.zeros((1,), mx.int32)
            out, version = self._kernels.attend_chunks(queries, self._pool, table, chunks, version, self._sinks)
            results.append(out)
            wanted.append(reference.attend_chunks(g, queries, self._pool, table, chunks, self._sinks))
        return results, wanted

    def _copy_blocks(self) -> tuple[Arrays, Arrays]:
        pairs = mx.array([[0, 5], [7, 2]], mx.int32)
        pool = self._pool.copy()
        mx.eval(self._kernels.copy_blocks(pool, pairs, mx.zeros((1,), mx.int32)))
        return pool.numbers(), reference.copy_blocks(self.geometry, self._pool, pairs).numbers()

    def _order(self) -> tuple[Arrays, Arrays]:
        """Steps that each read what the one before wrote: all in one evaluation, one by one, and overlapping."""
        chained, apart, overlapping = self._pool.copy(), self._pool.copy(), self._pool.copy()
        wanted = self._steps(apart, lambda arrays: mx.eval(arrays))
        in_one = self._steps(chained, lambda arrays: None)
        in_flight = self._steps(overlapping, lambda arrays: mx.async_eval(arrays))  # type: ignore[no-untyped-call]
        expected = [*wanted, *wanted]
        return [*in_one, *in_flight], expected

    def _steps(self, pool: HeldPool, start: Callable[[list[mx.array]], None]) -> list[mx.array]:
        g, version = self.geometry, mx.zeros((1,), mx.int32)
        lengths = mx.array([1, 1, 30, 60], mx.int32)
        new, outputs = self._new, []
        for step in range(_ORDER_STEPS):
            out, version = self._kernels.decode(
                self._queries, *new, pool, self._table, lengths + step, version, self._sinks
            )
            chunk = out[:, : g.num_kv_heads]
            version = self._kernels.write(chunk, chunk, pool, mx.arange(len(_LENGTHS)) + step, version)
            span = mx.array([0, 24, 24], mx.int32)
            keys, values, version = self._kernels.gather(pool, self._table[2], span, 24, version)
            new = (new[0] + keys[:, :, :1] * 0.1, new[1] + values[:, :, 1:2] * 0.1)
            outputs += [out, keys]
            start([out, keys, version])
        return outputs


def sampling_trial(factory: KernelFactory, dtype: mx.Dtype) -> Verdict:
    """The sampling kernel against greedy choice and against draws without filters, with rows of both kinds."""

    def trial() -> tuple[Arrays, Arrays]:
        random = np.random.default_rng(2)
        logits = mx.array(random.standard_normal((6, _VOCAB_SIZE_TOKENS)).astype(np.float32) * 3).astype(dtype)
        keys = mx.array(random.integers(0, 2**31, (2, 6)).astype(np.int32))
        temperature = np.array([0, 1, 0, 1, 1, 1], np.float32)
        settings = np.stack([temperature, np.ones(6, np.float32), np.zeros(6, np.float32)])
        limits = np.array([1, 1, 50] + [_VOCAB_SIZE_TOKENS] * 3, np.int32)
        tokens, broken = SampleKernel(factory)(logits, mx.array(settings), mx.array(limits), keys)
        noisy = logits.astype(mx.float32) + gumbel(keys.view(mx.uint32).T, _VOCAB_SIZE_TOKENS)
        drawn = mx.argmax(noisy, axis=-1)
        greedy = mx.argmax(logits, axis=-1)
        wanted = mx.where(mx.array([False, False, False, True, True, True]), drawn, greedy)
        return [tokens.astype(mx.float32), broken], [wanted.astype(mx.float32), mx.zeros_like(broken)]

    return judge(SAMPLING, trial, 0.0)


def projection_trial(factory: KernelFactory, dtype: mx.Dtype) -> Verdict:
    """The projection kernel, for each number of rows that it is built for."""

    def trial() -> tuple[Arrays, Arrays]:
        random = np.random.default_rng(4)
        results: list[mx.array] = []
        wanted: list[mx.array] = []
        kernel = ProjectionKernel(factory)
        weight = mx.array(random.standard_normal((96, 128)).astype(np.float32)).astype(dtype)
        for num_rows in (3, 16, 32):
            x = mx.array(random.standard_normal((num_rows, 1, 128)).astype(np.float32)).astype(dtype)
            results.append(kernel(x, weight))
            wanted.append(x.astype(mx.float32) @ weight.astype(mx.float32).T)
        return results, wanted

    return judge(PROJECTIONS, trial, _TOLERANCES[dtype])


def rotation_trial(factory: KernelFactory, dtype: mx.Dtype, head_dim: int) -> Verdict:
    """The rotation kernel at positions near and far."""

    def trial() -> tuple[Arrays, Arrays]:
        random = np.random.default_rng(5)
        heads = Heads(4, 2, head_dim)
        joined = mx.array(random.standard_normal((5, 1, heads.width)).astype(np.float32)).astype(dtype)
        positions = mx.array([0, 1, 2, 777, 5000], mx.int32)
        frequencies = mx.array((10_000.0 ** -(np.arange(head_dim // 2) / (head_dim // 2))).astype(np.float32))
        results = RotationKernel(factory)(joined, positions, frequencies, heads)
        return results, reference.rotate(joined, positions, frequencies, heads)

    return judge(ROTATION, trial, _TOLERANCES[dtype])


def norm_trial(factory: KernelFactory, dtype: mx.Dtype) -> Verdict:
    """The kernel of a residual and its norm, for a width that leaves threads idle and one that gives them several."""

    def trial() -> tuple[Arrays, Arrays]:
        random = np.random.default_rng(8)
        results: list[mx.array] = []
        wanted: list[mx.array] = []
        for width in (72, 9000):
            x, y, weight = (
                mx.array(random.standard_normal(shape).astype(np.float32)).astype(dtype)
                for shape in ((3, 1, width), (3, 1, width), (width,))
            )
            results += AddNormKernel(factory)(x, y, weight, mx.array([1e-5], mx.float32))
            wanted += reference.add_norm(x, y, weight, 1e-5)
        return results, wanted

    return judge(NORMS, trial, _TOLERANCES[dtype])


def judge(name: str, trial: Callable[[], tuple[Arrays, Arrays]], tolerance: float) -> Verdict:
    """Run ``trial`` and compare what it gives with what it wants."""
    try:
        results, wanted = trial()
        error = max(_difference(a, b) for a, b in zip(results, wanted, strict=True))
    except Exception as failure:
        return Verdict(name, f"does not run: {type(failure).__name__}: {str(failure)[:500]}", float("inf"))
    problem = "" if error <= tolerance else f"differs from its reference by {error:.3g}, {tolerance:.3g} is allowed"
    return Verdict(name, problem, error)


def _difference(result: mx.array, wanted: mx.array) -> float:
    a, b = result.astype(mx.float32), wanted.astype(mx.float32)
    difference = float(np.max(np.array(mx.abs(a - b) / (1 + mx.abs(b)))))
    return difference if np.isfinite(difference) else float("inf")
