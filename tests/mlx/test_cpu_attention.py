"""Attention written out for the CPU, against MLX's own function."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.mlx_backend.cpu_attention import attend_chunk, attend_rows

D = 16


def random_arrays(B: int, H: int, kv_heads: int, L: int, S: int) -> tuple[mx.array, mx.array, mx.array]:
    mx.random.seed(B * S + L)
    shapes = ((B, H, L, D), (B, kv_heads, S, D), (B, kv_heads, S, D))
    queries, keys, values = (mx.random.normal(shape) * 3 for shape in shapes)
    return queries, keys, values


def sinks_for(H: int, wanted: bool) -> mx.array | None:
    return mx.random.normal((H,)) * 4 if wanted else None


@pytest.mark.parametrize(("H", "kv_heads"), [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize(("B", "S"), [(1, 1), (1, 70), (5, 64), (3, 700), (1, 1500)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows(H: int, kv_heads: int, B: int, S: int, with_sinks: bool) -> None:
    queries, keys, values = random_arrays(B, H, kv_heads, 1, S)
    sinks = sinks_for(H, with_sinks)
    lengths = np.random.default_rng(S).integers(1, S + 1, B)
    valid = mx.array((np.arange(S) < lengths[:, None])[:, None, None])
    for mask in (None, valid):
        expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask, sinks=sinks)
        np.testing.assert_allclose(attend_rows(queries, keys, values, 0.3, mask, sinks), expected, atol=1e-4)


@pytest.mark.parametrize(("L", "S"), [(2, 2), (2, 90), (127, 127), (128, 128), (129, 129), (300, 300), (300, 811)])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 40])
def test_chunks(L: int, S: int, with_sinks: bool, window: int | None) -> None:
    queries, keys, values = random_arrays(1, 6, 2, L, S)
    sinks = sinks_for(6, with_sinks)
    position, key = np.arange(S - L, S)[:, None], np.arange(S)[None]
    mask = None if window is None else mx.array((key <= position) & (key > position - window))
    expected = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=0.3, mask="causal" if mask is None else mask, sinks=sinks
    )
    np.testing.assert_allclose(attend_chunk(queries, keys, values, 0.3, mask, sinks), expected, atol=1e-4)


def test_scores_far_apart_do_not_overflow() -> None:
    queries, keys, values = random_arrays(1, 2, 2, 4, 600)
    expected = mx.fast.scaled_dot_product_attention(queries * 1e4, keys, values, scale=1.0, mask="causal")
    out = attend_chunk(queries * 1e4, keys, values, 1.0, None, None)
    np.testing.assert_allclose(out, expected, atol=1e-3)
