"""The cut-off of each row: by sorting and by bisection, down to scores that differ in their last bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from engine.mlx_backend.filters import Filters, floor_by_bisection, floor_by_sorting, keep_allowed

V = 400


def make_filters(top_k: list[int], top_p: list[float], min_p: list[float] | None = None) -> Filters:
    return Filters(np.array(top_k), np.array(top_p, np.float32), np.array(min_p or [0.0] * len(top_k), np.float32))


def neighbouring_scores(num_rows: int) -> mx.array:
    """Scores whose best 40 differ by one unit in the last place each, in random order."""
    best = -1 - np.spacing(np.float32(1)) * np.arange(40, dtype=np.float32)
    rest = np.linspace(-2, -9, V - 40, dtype=np.float32)
    rng = np.random.default_rng(0)
    return mx.array(np.stack([rng.permutation(np.concatenate([best, rest])) for _ in range(num_rows)]))


@pytest.mark.parametrize("find", [floor_by_sorting, floor_by_bisection])
def test_top_k_separates_neighbouring_floats(find) -> None:  # type: ignore[no-untyped-def]
    top_k = [1, 2, 7, 39, 40, 41, 399, 400]
    scores = neighbouring_scores(len(top_k))
    floor = find(scores, make_filters(top_k, [1.0] * len(top_k)))
    assert mx.sum(scores >= floor, axis=-1).tolist() == top_k


@pytest.mark.parametrize("find", [floor_by_sorting, floor_by_bisection])
def test_top_p_keeps_the_smallest_set_that_reaches_it(find) -> None:  # type: ignore[no-untyped-def]
    scores = mx.log(mx.array([[0.4, 0.3, 0.2, 0.1]] * 6)) - np.log(0.4)
    floor = find(scores, make_filters([4] * 6, [0.05, 0.39, 0.41, 0.69, 0.91, 1.0]))
    assert mx.sum(scores >= floor, axis=-1).tolist() == [1, 1, 2, 2, 4, 4]


def test_sorting_and_bisection_agree_on_random_rows() -> None:
    rng = np.random.default_rng(1)
    num_rows = 200
    scores = mx.array((rng.normal(size=(num_rows, V)) * rng.uniform(0.1, 8, (num_rows, 1))).astype(np.float32))
    scores = scores - mx.max(scores, axis=-1, keepdims=True)
    filters = make_filters(
        rng.choice([1, 3, 50, 399, V], num_rows).tolist(), rng.choice([0.01, 0.5, 0.9, 0.999, 1.0], num_rows).tolist()
    )
    kept = [mx.sum(scores >= find(scores, filters), axis=-1) for find in (floor_by_sorting, floor_by_bisection)]
    assert kept[0].tolist() == kept[1].tolist()


def test_masked_tokens_are_never_kept() -> None:
    scores = mx.array([[0.0, -1.0, -mx.inf, -mx.inf]] * 3)
    for host_may_wait in (True, False):
        kept = keep_allowed(
            scores, make_filters([4, 3, 4], [1.0, 1.0, 0.9999999], [0.0, 0.0, 0.1]), host_may_wait=host_may_wait
        )
        assert (kept > -mx.inf).tolist() == [[True, True, False, False]] * 3


def test_off_means_that_no_row_leaves_anything_out() -> None:
    assert make_filters([V, V], [1.0, 1.0]).is_off(V)
    assert not make_filters([V, 5], [1.0, 1.0]).is_off(V)
    assert not make_filters([V, V], [1.0, 0.9]).is_off(V)
    assert not make_filters([V, V], [1.0, 1.0], [0.0, 0.1]).is_off(V)
