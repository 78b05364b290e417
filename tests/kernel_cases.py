"""Random work for the kernels: poisoned pools, scattered block tables, and checks against the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.kernels import reference
from engine.mlx_backend.kernels.paged_attention import PagedKernels
from engine.mlx_backend.kernels.reference import HeldPool, hold
from engine.mlx_backend.kernels.tiling import TUNINGS, Geometry

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
WIDE, NARROW = TUNINGS["cuda"], TUNINGS["metal"]
AHEAD = dataclasses.replace(WIDE, loads_ahead=True)
CONFIGURATIONS = {
    "grouped heads, 128 wide, bf16": (Geometry(8, 2, 128, 16, 128**-0.5), BF16, BF16, WIDE),
    "the same, cut for Metal": (Geometry(8, 2, 128, 16, 128**-0.5), BF16, BF16, NARROW),
    "the same, loading ahead": (Geometry(8, 2, 128, 16, 128**-0.5), BF16, BF16, AHEAD),
    "three heads a group, 64 wide, fp32": (Geometry(9, 3, 64, 16, 0.125), F32, F32, WIDE),
    "no groups, 80 wide, soft cap, sinks": (Geometry(2, 2, 80, 8, 0.1, 0, 30.0, True), F16, F16, WIDE),
    "seven heads a group, 96 wide, window": (Geometry(7, 1, 96, 16, 0.1, 50, 0.0, True), F16, F16, AHEAD),
    "one head for all, 64 wide, fp32 pool": (Geometry(8, 1, 64, 16, 0.125), BF16, F32, WIDE),
    "two tiles, 256 wide, bf16 pool": (Geometry(32, 2, 256, 32, 0.0625, 700), F32, BF16, NARROW),
}

# Geometry, the model's numbers, what a packed pool's are read as, its bits, tuning.
PACKED_CONFIGURATIONS = {
    "8 bits, grouped heads, 128 wide, bf16": (Geometry(8, 2, 128, 16, 128**-0.5), BF16, BF16, 8, WIDE),
    "4 bits, eight heads a group, 128 wide, fp16": (Geometry(8, 1, 128, 16, 128**-0.5), F16, F16, 4, WIDE),
    "8 bits, 160 wide, soft cap, sinks, fp32": (Geometry(2, 2, 160, 8, 0.1, 0, 30.0, True), F32, F32, 8, WIDE),
    "4 bits, 96 wide, window, loading ahead": (Geometry(7, 1, 96, 16, 0.1, 50, 0.0, True), F16, F16, 4, AHEAD),
}

# Largest |error| allowed, in units of the result's own size: half the spacing of the output's numbers, and a little.
TOLERANCES = {mx.float32: 2e-5, mx.float16: 2e-3, mx.bfloat16: 1.5e-2}


@dataclass
class Case:
    """Rows of ``lengths`` (the new token counted) whose past lies in a pool that is NaN everywhere else. With
    ``kv_bits`` the pool is packed: every unused position's scale and bias is NaN."""

    geometry: Geometry
    dtype: mx.Dtype
    pool_dtype: mx.Dtype
    lengths: Sequence[int]
    seed: int
    kv_bits: int | None = None

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        g, longest = self.geometry, max(self.lengths)
        self.width = 1
        while self.width * g.block_size < longest:
            self.width *= 2
        needed = [-(-length // g.block_size) for length in self.lengths]
        self.num_blocks = sum(needed) + 5
        blocks = self.random.permutation(self.num_blocks)
        # Unused entries point far outside: reading one would show.
        self.table = np.full((len(self.lengths), self.width), 2**24, np.int32)
        for row, count in enumerate(needed):
            self.table[row, :count] = blocks[sum(needed[:row]) : sum(needed[:row]) + count]
        self.pool = HeldPool(self._poisoned(), self._poisoned(), self.kv_bits)
        B, D = len(self.lengths), g.head_dim
        self.queries = self.draw(B, g.num_heads, 1, D, scale=2.0)
        self.k_new, self.v_new = self.draw(B, g.num_kv_heads, 1, D), self.draw(B, g.num_kv_heads, 1, D)
        self.sinks = self.draw(g.num_heads) if g.has_sinks else None
        mx.eval(self.pool.arrays(), self.queries, self.k_new, self.v_new)

    def draw(self, *shape: int, scale: float = 1.0) -> mx.array:
        """Normal numbers of the model's type."""
        return mx.array(self.random.standard_normal(shape).astype(np.float32) * scale).astype(self.dtype)

    def filled(self) -> HeldPool:
        """A pool of the same size with numbers at every position."""
        shape = len(self.pool.keys[0]), self.geometry.head_dim
        keys, values = (mx.array(self.random.standard_normal(shape).astype(np.float32)) for _ in range(2))
        return HeldPool.of(keys, values, self.pool_dtype, self.kv_bits)

    def _poisoned(self) -> list[mx.array]:
        g = self.geometry
        rows = (self.num_blocks + 1) * g.block_size
        numbers = np.full((g.num_kv_heads, rows, g.head_dim), np.nan, np.float32)
        for row, length in enumerate(self.lengths):
            past = np.arange(max(0, length - g.window) if g.window else 0, length - 1)
            places = self.table[row, past // g.block_size] * g.block_size + past % g.block_size
            numbers[:, places] = self.random.standard_normal((g.num_kv_heads, len(past), g.head_dim))
        held = hold(mx.array(np.nan_to_num(numbers.reshape(-1, g.head_dim))), self.pool_dtype, self.kv_bits)
        unused = mx.array(np.isnan(numbers).any(axis=-1).reshape(-1, 1))
        return [x if x.dtype == mx.uint32 else mx.where(unused, mx.array(np.nan, x.dtype), x) for x in held]

    def check_decode(self, kernels: PagedKernels) -> None:
        """One decode step: result, stored tokens, untouched rest and version against the reference."""
        lengths = mx.array(np.array(self.lengths, np.int32))
        safe_table = mx.array(np.minimum(self.table, self.num_blocks))
        wanted, pool = reference.decode(
            self.geometry, self.queries, self.k_new, self.v_new, self.pool.copy(), safe_table, lengths, self.sinks
        )
        mx.eval(wanted, pool.arrays())
        version = mx.array([self.seed], mx.int32)
        out, version = kernels.decode(
            *(self.queries, self.k_new, self.v_new, self.pool, mx.array(self.table), lengths, version, self.sinks)
        )
        assert version.item() == self.seed + 1
        assert same_pools(self.pool, pool), "not exactly the new tokens were stored"
        error = float(mx.max(mx.abs(out.astype(mx.float32) - wanted) / (1.0 + mx.abs(wanted))))
        assert error <= TOLERANCES[self.dtype], f"{self.lengths}: error {error}"


def same(a: mx.array, b: mx.array) -> bool:
    """Equal number by number, NaN equal to NaN."""
    return bool(mx.array_equal(a, b, equal_nan=True))


def same_pools(a: HeldPool, b: HeldPool) -> bool:
    """Every array equal."""
    return all(same(x, y) for x, y in zip(a.arrays(), b.arrays(), strict=True))


def random_lengths(random: np.random.Generator, num_rows: int, longest: int, block_size: int) -> list[int]:
    """Lengths from 1 to ``longest``: many short, some at the edges of blocks, some empty rows."""
    lengths: npt.NDArray[np.int64] = np.exp(random.uniform(0, np.log(longest), num_rows)).astype(int)
    edges = random.random(num_rows) < 0.3
    lengths[edges] = np.maximum(1, lengths[edges] // block_size * block_size + random.integers(0, 2, edges.sum()))
    lengths[random.random(num_rows) < 0.1] = 0
    lengths[random.integers(num_rows)] = longest
    return [int(length) for length in np.minimum(lengths, longest)]
