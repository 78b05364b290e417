"""The sampling kernel's text on the CPU against the sampler in plain MLX operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import engine.mlx_backend  # noqa: F401  (loads the BLAS before MLX computes)
from engine.mlx_backend.filters import Filters, floor_by_sorting, keep_allowed
from engine.mlx_backend.kernels.sampling import SampleKernel
from engine.mlx_backend.noise import gumbel, row_keys
from tests.kernel_emulator import COMPILER, Emulator

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

NUM_ROWS, NUM_TOKENS = 24, 1777


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> SampleKernel:
    mx.set_default_device(mx.Device(mx.cpu, 0))
    return SampleKernel(Emulator(tmp_path_factory.mktemp("sampling")))


def run(
    kernel: SampleKernel, logits: mx.array, temperature: object, top_k: object, top_p: object, min_p: object, index: int
) -> tuple[list[int], list[int]]:
    rows = logits.shape[0]
    settings = np.stack([np.broadcast_to(np.float32(x), rows) for x in (temperature, top_p, min_p)])
    keys = row_keys(list(range(rows)), [index] * rows).view(mx.int32).T
    limits = mx.array(np.broadcast_to(np.int32(top_k), rows))
    tokens, broken = kernel(logits, mx.array(settings), limits, keys)
    return tokens.tolist(), broken.tolist()  # type: ignore[return-value]


def draw(logits: mx.array, temperature: float, top_k: int, top_p: float, min_p: float, index: int) -> list[int]:
    rows = logits.shape[0]
    filters = Filters(np.full(rows, top_k), np.full(rows, top_p, np.float32), np.full(rows, min_p, np.float32))
    scores = (logits - mx.max(logits, axis=-1, keepdims=True)) / temperature
    scores = keep_allowed(scores, filters, host_may_wait=True)
    keys = row_keys(list(range(rows)), [index] * rows)
    return mx.argmax(scores + gumbel(keys, logits.shape[1]), axis=-1).tolist()  # type: ignore[return-value]


def random_logits(seed: int, scale: float = 3.0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal((NUM_ROWS, NUM_TOKENS)).astype(np.float32) * scale)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        pytest.param(1.0, NUM_TOKENS, 1.0, 0.0, id="nothing left out"),
        pytest.param(0.7, 40, 1.0, 0.0, id="top_k"),
        pytest.param(1.3, NUM_TOKENS, 0.9, 0.0, id="top_p"),
        pytest.param(1.0, NUM_TOKENS, 1.0, 0.05, id="min_p"),
        pytest.param(0.8, 50, 0.95, 0.01, id="all three"),
        pytest.param(0.8, 1, 0.95, 0.0, id="one token"),
    ],
)
def test_draws_what_the_sampler_draws(
    kernel: SampleKernel, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    for index in range(3):
        logits = random_logits(index)
        tokens, broken = run(kernel, logits, temperature, top_k, top_p, min_p, index)
        assert tokens == draw(logits, temperature, top_k, top_p, min_p, index)
        assert broken == [0] * NUM_ROWS


def test_draws_only_what_the_filters_keep_and_all_of_it(kernel: SampleKernel) -> None:
    logits = mx.repeat(random_logits(5, scale=1.0)[:1, :60], 400, axis=0)
    filters = Filters(np.full(1, 20), np.full(1, 0.8, np.float32), np.zeros(1, np.float32))
    scores = logits[:1] - mx.max(logits[:1])
    kept = {i for i, x in enumerate((scores >= floor_by_sorting(scores, filters))[0].tolist()) if x}  # type: ignore[arg-type, index]
    tokens, _ = run(kernel, logits, 1.0, 20, 0.8, 0.0, 0)
    assert set(tokens) == kept


def test_greedy_takes_the_first_of_the_best(kernel: SampleKernel) -> None:
    logits = random_logits(1)
    logits[3, 700] = logits[3, 1700] = 99.0
    tokens, _ = run(kernel, logits, 0.0, 5, 0.5, 0.5, 0)
    assert tokens == mx.argmax(logits, axis=-1).tolist()


def test_rows_are_mixed_freely(kernel: SampleKernel) -> None:
    """Each row's token is the one it gets in a batch where all rows have its settings."""
    logits = random_logits(2)
    settings = [(0.0, NUM_TOKENS, 1.0, 0.0), (0.8, 40, 0.9, 0.0), (1.5, NUM_TOKENS, 0.7, 0.1)]
    alone = [run(kernel, logits, *setting, 4)[0] for setting in settings]
    mixed = [np.array([settings[i % 3][j] for i in range(NUM_ROWS)]) for j in range(4)]
    tokens, _ = run(kernel, logits, *mixed, 4)
    assert tokens == [alone[i % 3][i] for i in range(NUM_ROWS)]


def test_rows_that_are_no_numbers_are_marked(kernel: SampleKernel) -> None:
    logits = random_logits(3)
    logits[1, 5], logits[2, 6], logits[4] = float("nan"), float("inf"), float("-inf")
    logits[4, 8] = 0.0  # all but one token masked
    for temperature in (0.0, 1.0):
        tokens, broken = run(kernel, logits, temperature, NUM_TOKENS, 0.9, 0.0, 0)
        assert [i for i, bad in enumerate(broken) if bad] == [1, 2]
        assert tokens[4] == 8
        assert all(0 <= token < NUM_TOKENS for token in tokens)
