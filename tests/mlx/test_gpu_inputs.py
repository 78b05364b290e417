"""Rungs, uploads and the arrays of GPU steps, against what the rows say."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from engine.batch import BatchRow, StepBatch
from engine.mlx_backend.gpu_inputs import GpuInputBuilder, HostStep
from engine.mlx_backend.noise import row_keys
from engine.mlx_backend.rungs import RUNGS, rung_for, rungs_up_to, table_width, token_rung, token_rungs
from engine.mlx_backend.uploads import pack
from engine.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def test_rungs_hold_every_number_of_rows() -> None:
    for num_rows in range(1, 129):
        rung = rung_for(num_rows)
        assert rung in RUNGS
        assert rung >= num_rows
    assert rungs_up_to(9) == (1, 2, 4, 8, 12)


def test_a_higher_rung_is_taken_where_it_is_clearly_faster() -> None:
    times_s = {8: 0.007, 12: 0.012, 16: 0.0128, 24: 0.0079, 32: 0.0076}
    assert rung_for(16, times_s) == 32
    assert rung_for(10, times_s) == 32
    assert rung_for(8, times_s) == 8
    assert rung_for(8, {8: 0.0100, 12: 0.0099}) == 8
    assert rung_for(8, {12: 0.001}) == 8  # what was not measured itself is not left


def test_token_rungs_and_table_widths() -> None:
    assert [token_rung(n) for n in (1, 64, 65, 512, 513, 2049)] == [64, 64, 128, 512, 640, 2560]
    assert token_rungs(200) == [64, 128, 192, 256]
    assert [table_width(n, 32, 100) for n in (1, 32, 33, 65, 100)] == [32, 32, 64, 100, 100]


def test_uploads_come_back_as_they_were() -> None:
    arrays = {
        "a": np.arange(6, dtype=np.int32).reshape(2, 3),
        "f": np.array([0.5, -1.5], np.float32),
        "none": np.zeros((0, 4), np.int32),
        "b": np.array([7], np.int32),
    }
    layout, upload = pack(arrays)
    views = layout.unpack(upload)
    assert np.array_equal(np.array(views["a"]), arrays["a"])
    assert np.array_equal(np.array(views["f"].view(mx.float32)), arrays["f"])
    assert views["none"].shape == (0, 4)
    assert views["b"].item() == 7
    assert layout == pack(arrays)[0]


def builder(*, pages_chunks: bool = True, num_window_blocks: int | None = None) -> GpuInputBuilder:
    return GpuInputBuilder(
        block_size=4,
        max_model_len=64,
        slots=6,
        vocab_size_tokens=50,
        windows=(0, 8),
        pages_chunks=pages_chunks,
        num_window_blocks=num_window_blocks,
    )


def row(
    slot: int,
    start: int,
    num_tokens: int,
    *,
    known: int | None = None,
    sampling: SamplingParams = GREEDY,
    samples: bool = True,
) -> BatchRow:
    """Tokens of slot s are 10 s, 10 s + 1, ...; its blocks are 5 s, 5 s + 1, ..."""
    end = start + num_tokens
    return BatchRow(
        request_id=f"r{slot}",
        slot=slot,
        start=start,
        num_tokens=num_tokens,
        token_ids=[10 * slot + i for i in range(end if known is None else known)],
        block_ids=[5 * slot + i for i in range(-(-end // 4))],
        num_prompt_tokens=1,
        sampling=sampling,
        seed=slot,
        samples=samples,
        output_index=start,
    )


def arrays_of(host: HostStep) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int32]]]:
    return {name: np.array(view) for name, view in host.shape.layout.unpack(host.upload).items()}


def test_decode_rows_are_padded_and_unknown_tokens_marked() -> None:
    drawn = SamplingParams(temperature=0.7, top_p=0.9, top_k=99, min_p=0.1)
    host = builder().build(StepBatch(0, (row(2, 7, 1), row(0, 4, 1, known=4, sampling=drawn), row(5, 0, 1))))
    arrays = arrays_of(host)
    assert host.shape.num_decode_rows == 4
    assert arrays["tokens"].tolist() == [27, -1, 50, 0]
    assert arrays["slots"].tolist() == [2, 0, 5, 6]
    assert arrays["head_slots"].tolist() == [2, 0, 5, 6]
    assert arrays["lengths"].tolist() == [8, 5, 1, 0]
    assert arrays["table"][:, :2].tolist() == [[10, 11], [0, 1], [25, 0], [0, 0]]
    assert arrays["limits"].tolist() == [50, 50, 50, 50]
    assert arrays["settings"].view(np.float32)[:, 1].tolist() == pytest.approx([0.7, 0.9, 0.1])
    assert arrays["settings"].view(np.float32)[:, 0].tolist() == [0.0, 1.0, 0.0]
    assert np.array_equal(arrays["keys"].view(np.uint32)[:, 1], np.array(row_keys([0], [4]))[0])


def test_tables_follow_requests_as_they_grow_and_change_slots() -> None:
    inputs = builder()
    first = row(1, 3, 1)
    assert arrays_of(inputs.build(StepBatch(0, (first,))))["table"][0, :2].tolist() == [5, 0]
    first.block_ids.append(19)  # type: ignore[attr-defined]
    grown = BatchRow(**{**{name: getattr(first, name) for name in BatchRow.__slots__}, "start": 4})
    assert arrays_of(inputs.build(StepBatch(1, (grown,))))["table"][0, :2].tolist() == [5, 19]
    other = BatchRow(**{**{name: getattr(grown, name) for name in BatchRow.__slots__}, "block_ids": [3, 4]})
    assert arrays_of(inputs.build(StepBatch(2, (other,))))["table"][0, :2].tolist() == [3, 4]


def test_paged_chunks_say_nothing_of_positions_in_their_shape() -> None:
    inputs = builder()
    one = inputs.build(StepBatch(0, (row(0, 3, 1), row(1, 0, 10, samples=False), row(2, 6, 5))))
    other = inputs.build(StepBatch(1, (row(3, 9, 1), row(4, 20, 30), row(5, 2, 9))))
    assert one.shape == other.shape
    arrays = arrays_of(one)
    R, C = one.shape.num_decode_rows, one.shape.num_chunk_rows
    assert (R, C) == (8, 64)
    assert arrays["chunks"].tolist() == [[0, 10, 0], [10, 5, 6]]
    assert arrays["chunk_tokens"][:15].tolist() == [*range(10, 20), *range(26, 31)]
    assert arrays["chunk_positions"][:15].tolist() == [*range(10), *range(6, 11)]
    assert arrays["chunk_targets"][:15].tolist() == [*range(20, 30), *range(46, 51)]
    assert set(arrays["chunk_targets"][15:].tolist()) == {-1}
    assert arrays["head_index"].tolist() == [*range(8), R + 9, R + 14]
    assert [None if r is None else r.request_id for r in one.head_rows] == ["r0", *[None] * 8, "r2"]
    assert arrays["head_slots"].tolist() == [0, *[6] * 8, 2]


def test_gathered_chunks_carry_their_spans() -> None:
    host = builder(pages_chunks=False).build(StepBatch(0, (row(0, 3, 1), row(2, 17, 5))))
    arrays = arrays_of(host)
    assert [(c.first, c.count, c.start) for c in host.shape.gathered] == [(1, 5, 17)]
    assert arrays["span_0_0"].tolist() == [0, 22, 22]
    assert arrays["span_8_0"].tolist() == [8, 22, 14]  # the first token sees 10 to 17; 8 is its block's start
    assert arrays["head_index"].tolist() == [0, 5]


@pytest.mark.parametrize("pages_chunks", [True, False], ids=["paged", "gathered"])
def test_window_layers_have_tables_and_targets_of_their_own(pages_chunks: bool) -> None:
    """A hole is the null block, the one behind the pool's last."""
    decode = dataclasses.replace(row(0, 9, 1), window_block_ids=[-1, 12, 11])
    chunk = dataclasses.replace(row(2, 17, 5), window_block_ids=[-1, -1, 7, 8, 2, 6])
    host = builder(pages_chunks=pages_chunks, num_window_blocks=20).build(StepBatch(0, (decode, chunk)))
    arrays = arrays_of(host)
    assert arrays["window_table"][0, :3].tolist() == [20, 12, 11]
    assert arrays["table"][0, :3].tolist() == [0, 1, 2]
    assert arrays["window_chunk_targets"][:5].tolist() == [9, 10, 11, 24, 25]
    assert arrays["chunk_targets"][:5].tolist() == [57, 58, 59, 60, 61]
    table = arrays["window_chunk_tables"][0] if pages_chunks else arrays["window_chunk_table0"]
    assert table[:6].tolist() == [20, 20, 7, 8, 2, 6]
