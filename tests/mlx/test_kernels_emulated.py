"""The kernels' text, run thread by thread on the CPU, against the plain-MLX reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import engine.mlx_backend  # noqa: F401  (loads the BLAS before MLX computes)
from engine.mlx_backend.kernels import reference
from engine.mlx_backend.kernels.norming import AddNormKernel
from engine.mlx_backend.kernels.paged_attention import PagedKernels
from engine.mlx_backend.kernels.projecting import ProjectionKernel
from engine.mlx_backend.kernels.reference import HeldPool
from engine.mlx_backend.kernels.rotating import Heads, RotationKernel
from engine.mlx_backend.kernels.tiling import TUNINGS, Geometry, Tuning
from tests.kernel_cases import (
    CONFIGURATIONS,
    PACKED_CONFIGURATIONS,
    TOLERANCES,
    Case,
    random_lengths,
    same,
    same_pools,
)
from tests.kernel_emulator import COMPILER, Emulator

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

F32, BF16 = mx.float32, mx.bfloat16
F16 = mx.float16
WIDE = TUNINGS["cuda"]
ONE_SPLIT = {"chunk_groups": 0}
MANY_SPLITS = {"chunk_groups": 1000, "chunk_simds": 4, "chunk_keys": 64}


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    mx.set_default_device(mx.Device(mx.cpu, 0))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_decode(name: str, emulator: Emulator) -> None:
    geometry, dtype, pool_dtype, tuning = CONFIGURATIONS[name]
    random = np.random.default_rng(7)
    kernels = PagedKernels(geometry, dtype, pool_dtype, emulator, tuning)
    for seed, (num_rows, longest) in enumerate([(1, 1), (1, 5000), (2, 17), (5, 1500), (12, 200), (33, 40)]):
        lengths = random_lengths(random, num_rows, longest, geometry.block_size)
        Case(geometry, dtype, pool_dtype, lengths, seed).check_decode(kernels)


@pytest.mark.parametrize("name", PACKED_CONFIGURATIONS)
def test_decode_over_few_bits(name: str, emulator: Emulator) -> None:
    geometry, dtype, pool_dtype, kv_bits, tuning = PACKED_CONFIGURATIONS[name]
    random = np.random.default_rng(8)
    kernels = PagedKernels(geometry, dtype, pool_dtype, emulator, tuning, kv_bits)
    for seed, (num_rows, longest) in enumerate([(1, 1), (1, 3000), (5, 700), (33, 40)]):
        lengths = random_lengths(random, num_rows, longest, geometry.block_size)
        Case(geometry, dtype, pool_dtype, lengths, seed, kv_bits).check_decode(kernels)


@pytest.mark.parametrize("target_groups", [1, 1_000_000], ids=["one split", "most splits"])
def test_a_row_gives_the_same_in_one_split_and_in_many(target_groups: int, emulator: Emulator) -> None:
    geometry = Geometry(8, 2, 128, 16, 128**-0.5)
    tuning = Tuning(target_groups=target_groups, longest_span=10_000)
    kernels = PagedKernels(geometry, BF16, BF16, emulator, tuning)
    for seed, lengths in enumerate([[1024, 1, 64, 65, 0], [2000, 1999], [16, 17, 15]]):
        Case(geometry, BF16, BF16, lengths, seed).check_decode(kernels)


def test_tokens_stored_by_a_step_are_read_by_the_next(emulator: Emulator) -> None:
    """Two sequences grow over block borders from nothing; each step is checked against attention over all so far."""
    geometry = Geometry(4, 2, 64, 8, 0.125)
    kernels = PagedKernels(geometry, F32, F32, emulator, WIDE)
    random = np.random.default_rng(3)
    pool = HeldPool(*([mx.full((2 * 9 * 8, 64), float("nan"))] for _ in range(2)))
    table = mx.array([[5, 0, 7, 1], [2, 6, 3, 4]], mx.int32)
    version = mx.array([0], mx.int32)
    queries, keys, values = (mx.array(random.standard_normal((20, 2, h, 1, 64)).astype("f4")) for h in (4, 2, 2))
    for step in range(20):
        lengths = mx.array([step + 1, max(0, step - 5)], mx.int32)
        new_keys = keys[mx.array([step, max(0, step - 6)]), mx.array([0, 1])]
        new_values = values[mx.array([step, max(0, step - 6)]), mx.array([0, 1])]
        out, version = kernels.decode(queries[step], new_keys, new_values, pool, table, lengths, version)
        for row, length in enumerate(lengths.tolist()):  # type: ignore[arg-type]
            seen = slice(0, length)
            wanted = mx.fast.scaled_dot_product_attention(
                queries[step, row][None],
                keys[seen, row].squeeze(2).swapaxes(0, 1)[None],
                values[seen, row].squeeze(2).swapaxes(0, 1)[None],
                scale=0.125,
            )
            assert length == 0 or mx.allclose(out[row], wanted[0], atol=1e-5), (step, row)
    assert version.item() == 20


@pytest.mark.parametrize(
    ("name", "kv_bits"),
    [
        ("grouped heads, 128 wide, bf16", None),
        ("two tiles, 256 wide, bf16 pool", None),
        ("grouped heads, 128 wide, bf16", 8),
        ("three heads a group, 64 wide, fp32", 4),
    ],
)
def test_chunks_are_written_gathered_and_copied(name: str, kv_bits: int | None, emulator: Emulator) -> None:
    geometry, dtype, pool_dtype, tuning = CONFIGURATIONS[name]
    kernels = PagedKernels(geometry, dtype, pool_dtype, emulator, tuning, kv_bits)
    case = Case(dataclasses.replace(geometry, window=0), dtype, pool_dtype, [100, 1], 1, kv_bits)
    new_keys, new_values = (case.draw(41, geometry.num_kv_heads, 1, geometry.head_dim) for _ in range(2))
    free = sorted(set(range(case.num_blocks)) - set(case.table.reshape(-1).tolist()))
    places = np.concatenate([np.arange(geometry.block_size) + block * geometry.block_size for block in free])
    targets = mx.array(np.where(np.arange(41) % 7 == 3, -1, case.random.permutation(places)[:41]).astype(np.int32))

    wanted = reference.write(geometry, new_keys, new_values, case.pool.copy(), targets)
    version = kernels.write(new_keys, new_values, case.pool, targets, mx.array([0], mx.int32))
    assert same_pools(case.pool, wanted)

    table, span = mx.array(case.table[0]), mx.array([32, 99, 80], mx.int32)
    keys, values, version = kernels.gather(case.pool, table, span, 80, version)
    for gathered, numbers in zip((keys, values), reference.gather(geometry, case.pool, table, span, 80), strict=True):
        assert same(gathered, numbers.astype(dtype))

    pairs = mx.array([[int(case.table[0, 1]), free[0]], [int(case.table[1, 0]), free[1]]], mx.int32)
    wanted = reference.copy_blocks(geometry, case.pool.copy(), pairs)
    version = kernels.copy_blocks(case.pool, pairs, version)
    assert same_pools(case.pool, wanted)
    assert version.item() == 2 + len(case.pool.keys)


@pytest.mark.parametrize(
    "name",
    [
        "grouped heads, 128 wide, bf16",
        "no groups, 80 wide, soft cap, sinks",
        "seven heads a group, 96 wide, window",
        "one head for all, 64 wide, fp32 pool",
    ],
)
@pytest.mark.parametrize("cut", [ONE_SPLIT, MANY_SPLITS], ids=["one split", "many splits"])
def test_chunks_attend_over_their_paged_context(cut: dict[str, Any], name: str, emulator: Emulator) -> None:
    check_chunks(cut, name, None, emulator)


@pytest.mark.parametrize(
    ("cut", "name", "kv_bits"),
    [
        (ONE_SPLIT, "grouped heads, 128 wide, bf16", 8),
        (MANY_SPLITS, "seven heads a group, 96 wide, window", 4),
    ],
    ids=["8 bits, one split", "4 bits, many splits"],
)
def test_chunks_attend_over_few_bits(cut: dict[str, Any], name: str, kv_bits: int, emulator: Emulator) -> None:
    check_chunks(cut, name, kv_bits, emulator)


def check_chunks(cut: dict[str, Any], name: str, kv_bits: int | None, emulator: Emulator) -> None:
    """Chunk attention of a configuration of ``kernel_cases``, its tuning changed by ``cut``, against the reference."""
    geometry, dtype, pool_dtype, tuning = CONFIGURATIONS[name]
    tuning = dataclasses.replace(tuning, **cut)
    kernels = PagedKernels(geometry, dtype, pool_dtype, emulator, tuning, kv_bits)
    for seed, spans in enumerate([[(0, 1)], [(0, 70), (200, 33)], [(31, 2), (0, 0), (1000, 50)]]):
        # A chunk [start, start + count) is stored already: its last token counts as the past of a next one.
        case = Case(geometry, dtype, pool_dtype, [start + count + 1 for start, count in spans], seed, kv_bits)
        table = mx.array(case.table)
        rows = sum(count for _, count in spans)
        queries = case.draw(rows + 3, geometry.num_heads, 1, geometry.head_dim, scale=2.0)  # three rows of padding
        firsts = np.cumsum([0, *(count for _, count in spans[:-1])])
        chunks = mx.array([[f, count, start] for f, (start, count) in zip(firsts.tolist(), spans, strict=True)])
        pool = _unwindowed(case)
        out, version = kernels.attend_chunks(queries, pool, table, chunks, mx.array([4], mx.int32), case.sinks)
        safe = mx.array(np.minimum(case.table, case.num_blocks))
        wanted = reference.attend_chunks(geometry, queries, pool, safe, chunks, case.sinks)
        error = mx.max(mx.abs(out[:rows].astype(F32) - wanted[:rows]) / (1.0 + mx.abs(wanted[:rows])))
        assert float(error) <= TOLERANCES[dtype] * 1.5, spans  # weights are rounded to 16 bits before they are summed
        assert version.item() == 5


def _unwindowed(case: Case) -> HeldPool:
    """The case's pool with a past for every position: a chunk's first token sees further back than its last."""
    return case.pool if not case.geometry.window else case.filled()


@pytest.mark.parametrize("num_rows", [1, 8, 13, 32])
@pytest.mark.parametrize("depth", [512, 576], ids=["whole turns", "turns cut to fit"])
def test_projections(depth: int, num_rows: int, emulator: Emulator) -> None:
    random = np.random.default_rng(num_rows)
    x, weight = (mx.array(random.standard_normal((n, depth)).astype(np.float32)).astype(BF16) for n in (num_rows, 96))
    result = ProjectionKernel(emulator)(x[:, None], weight)[:, 0]
    wanted = x.astype(F32) @ weight.astype(F32).T
    assert float(mx.max(mx.abs(result.astype(F32) - wanted) / (1.0 + mx.abs(wanted)))) <= 5e-3


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [(Heads(32, 8, 128), BF16), (Heads(9, 3, 64), F32), (Heads(4, 4, 80), F16), (Heads(7, 1, 20), F16)],
    ids=lambda value: str(value),
)
def test_joined_heads_are_split_and_rotated(heads: Heads, dtype: mx.Dtype, emulator: Emulator) -> None:
    random = np.random.default_rng(1)
    joined = mx.array(random.standard_normal((5, 1, heads.width)).astype(np.float32)).astype(dtype)
    positions = mx.array([0, 1, 130, 4097, 100_000], mx.int32)
    frequencies = mx.array(random.uniform(1e-5, 1.0, heads.dim // 2).astype(np.float32))
    results = RotationKernel(emulator)(joined, positions, frequencies, heads)
    for result, wanted in zip(results, reference.rotate(joined, positions, frequencies, heads), strict=True):
        assert result.shape == wanted.shape
        error = mx.max(mx.abs(result.astype(F32) - wanted) / (1.0 + mx.abs(wanted)))
        assert float(error) <= {F32: 1e-5, F16: 1e-3, BF16: 8e-3}[dtype]


@pytest.mark.parametrize(("width", "dtype"), [(4096, BF16), (576, F32), (72, F16), (9001, F16)])
def test_a_residual_and_its_norm(width: int, dtype: mx.Dtype, emulator: Emulator) -> None:
    random = np.random.default_rng(width)
    x, y, weight = (
        mx.array(random.standard_normal(shape).astype(np.float32)).astype(dtype)
        for shape in ((5, 1, width), (5, 1, width), (width,))
    )
    total, normed = AddNormKernel(emulator)(x, y, weight, mx.array([1e-5], mx.float32))
    wanted_total, wanted = reference.add_norm(x, y, weight, 1e-5)
    assert same(total, wanted_total)
    error = mx.max(mx.abs(normed.astype(F32) - wanted) / (1.0 + mx.abs(wanted)))
    assert float(error) <= {F32: 1e-5, F16: 1e-3, BF16: 8e-3}[dtype]


def _mutated(emulator: Emulator, old: str, new: str) -> PagedKernels:
    """Kernels whose text was changed in one place."""

    def factory(*arguments: object) -> object:
        kernel = emulator(*arguments)  # type: ignore[arg-type]
        kernel._source = kernel._source.replace(old, new)
        return kernel

    geometry = Geometry(8, 2, 128, 16, 128**-0.5)
    return PagedKernels(geometry, BF16, BF16, factory, WIDE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param("BARRIER();", ";", "error", id="no barrier"),
        pytest.param("if (owner) {", "if (lane < 7) {", "do not meet", id="a simdgroup operation in part of the lanes"),
        pytest.param(
            "max((base) + u, begin), last - 1)", "(base) + u, last + 5)", "nan", id="a position not yet written"
        ),
        pytest.param("tile % TILES == 0) {", "false) {", "were stored", id="a token not stored"),
        pytest.param(
            "const int pos = seq_lens[row] - 1;", "const int pos = seq_lens[row];", "stored", id="one too far"
        ),
    ],
)
def test_the_emulator_notices(old: str, new: str, message: str, emulator: Emulator) -> None:
    kernels = _mutated(emulator, old, new)
    case = Case(kernels.geometry, BF16, BF16, [300, 44, 9], seed=2)
    with pytest.raises(AssertionError, match=message):
        case.check_decode(kernels)


@pytest.mark.parametrize("bits", [F16, BF16], ids=["fp16", "bf16"])
def test_the_emulator_rounds_as_mlx_does(bits: mx.Dtype, emulator: Emulator) -> None:
    """Writing fp32 into a 16-bit pool rounds every number: subnormals, ties, overflow and infinity among them."""
    geometry = Geometry(1, 1, 64, 16, 1.0)
    kernels = PagedKernels(geometry, F32, bits, emulator, WIDE)
    random = np.random.default_rng(0)
    numbers = random.standard_normal(64 * 32).astype(np.float32) * np.exp(random.uniform(-20, 13, 64 * 32))
    numbers[:8] = [0.0, -0.0, 65519.0, 65520.0, 1e-8, 6.1e-5, 1.00048828125, -np.inf]
    new = mx.array(numbers.astype(np.float32).reshape(32, 1, 1, 64))
    pool = HeldPool([mx.zeros((48, 64), bits)], [mx.zeros((48, 64), bits)])
    mx.eval(kernels.write(new, new, pool, mx.arange(32, dtype=mx.int32), mx.array([0], mx.int32)))
    assert same(pool.keys[0][:32], new.reshape(32, 64).astype(bits))
