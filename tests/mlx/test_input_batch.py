"""Index arrays of a step: what is written where, and how each row is read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from engine.batch import BatchRow, StepBatch
from engine.mlx_backend.input_batch import InputBuilder, LayerKind, Run, rung
from engine.request import SamplingParams

BLOCK_SIZE = 16
NUM_BLOCKS = 100
KIND = LayerKind(num_kv_heads=2)
PLANE = (NUM_BLOCKS + 1) * BLOCK_SIZE  # pool rows of one head


def make_row(request_id: str, start: int, num_tokens: int, blocks: Sequence[int], *, samples: bool = True) -> BatchRow:
    return BatchRow(
        request_id=request_id,
        slot=int(request_id),
        start=start,
        num_tokens=num_tokens,
        token_ids=[1000 * int(request_id) + i for i in range(start + num_tokens)],
        block_ids=blocks,
        num_prompt_tokens=1,
        sampling=SamplingParams(),
        seed=0,
        samples=samples,
        output_index=0,
    )


def build(*rows: BatchRow, kind: LayerKind = KIND):  # type: ignore[no-untyped-def]
    step = InputBuilder([kind], NUM_BLOCKS, BLOCK_SIZE).build(StepBatch(0, rows))
    return step, step.plans[kind]


def test_tokens_positions_and_pool_rows_follow_the_block_table() -> None:
    step, plan = build(make_row("3", 14, 4, [7, 2]), make_row("1", 5, 1, [9]))
    assert step.tokens[:, 0].tolist() == [1005, 3014, 3015, 3016, 3017]
    assert step.positions.tolist() == [5, 14, 15, 16, 17]
    rows = [9 * 16 + 5, 7 * 16 + 14, 7 * 16 + 15, 2 * 16, 2 * 16 + 1]
    assert plan.write_index.tolist() == [[row, row + PLANE] for row in rows]


def test_only_sampling_rows_reach_the_head() -> None:
    step, _ = build(make_row("0", 0, 3, [1], samples=False), make_row("1", 4, 1, [2]), make_row("2", 0, 2, [3]))
    assert [row.request_id for row in step.sampling_rows] == ["1", "2"]
    assert step.head_rows.tolist() == [0, 5]


def test_rows_of_one_rung_share_a_call_and_read_the_null_block_beyond_their_own() -> None:
    _, plan = build(
        make_row("0", 63, 1, [5, 8, 6, 7]), make_row("1", 80, 1, list(range(20, 40, 2))), make_row("2", 20, 1, [3, 1])
    )
    first, second = plan.decodes
    assert (first.first, first.count) == (0, 2)
    assert isinstance(first.source, mx.array)
    assert first.source[:, 0].tolist() == [[5, 8, 6, 7], [3, 1, NUM_BLOCKS, NUM_BLOCKS]]
    assert first.source[:, 1].tolist() == [[5 + 101, 8 + 101, 6 + 101, 7 + 101], [3 + 101, 1 + 101, 201, 201]]
    assert first.valid is not None
    assert first.valid[:, 0, 0].sum(axis=-1).tolist() == [64, 21]
    assert (second.first, second.count) == (2, 1)


def test_long_rows_side_by_side_are_read_where_they_stand() -> None:
    side_by_side, scattered = list(range(40, 60)), list(range(0, 40, 2))
    _, plan = build(make_row("0", 299, 1, scattered), make_row("1", 299, 1, side_by_side))
    run, gathered = plan.decodes
    assert run.source == Run(40 * BLOCK_SIZE, 300)
    assert isinstance(gathered.source, mx.array)


def test_a_window_is_read_from_its_first_block() -> None:
    kind = LayerKind(2, window=20)
    _, plan = build(make_row("0", 99, 1, list(range(0, 14, 2))), make_row("1", 90, 30, list(range(50, 58))), kind=kind)
    (rows,), (chunk,) = plan.decodes, plan.chunks
    assert isinstance(rows.source, mx.array)
    assert rows.source[0, 0, :2].tolist() == [10, 12]  # positions 80..111 of which 80..99 are seen
    assert rows.valid is not None
    assert np.flatnonzero(np.array(rows.valid)[0, 0, 0]).tolist() == list(range(20))
    assert chunk.source == Run(54 * BLOCK_SIZE, 120 - 64)
    assert chunk.mask is not None
    seen = np.array(chunk.mask)
    assert seen.shape == (30, 56)
    assert seen.sum(axis=1).tolist() == [20] * 30
    assert np.flatnonzero(seen[0]).tolist() == list(range(71 - 64, 91 - 64))


def test_a_token_in_flight_is_taken_from_its_slot() -> None:
    waiting = make_row("2", 6, 1, [4])
    waiting = BatchRow(**{**{name: getattr(waiting, name) for name in waiting.__slots__}, "token_ids": [0] * 6})
    builder = InputBuilder([KIND], NUM_BLOCKS, BLOCK_SIZE)
    batch = StepBatch(0, (waiting, make_row("1", 0, 3, [5])))
    step = builder.build(batch, mx.array([50, 51, 52, 53]))
    assert step.tokens[:, 0].tolist() == [52, 1000, 1001, 1002]
    with pytest.raises(AssertionError, match="not known to the host"):
        builder.build(batch)


def test_rungs_waste_at_most_an_eighth_beyond_the_smallest() -> None:
    rungs = [rung(length) for length in range(1, 20_000)]
    assert all(r >= length for length, r in enumerate(rungs, 1))
    assert all(r <= max(64, length * 1.125 + 64) for length, r in enumerate(rungs, 1))
    assert all(a <= b for a, b in pairwise(rungs))
    assert len(set(rungs)) < 70
