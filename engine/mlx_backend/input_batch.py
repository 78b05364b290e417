"""Turns a step's rows into the index arrays of one forward pass.

Owns: the packed order (decode rows by length, then chunks), positions, pool rows to write, the blocks each row reads.
Must not know: the model, the pool's arrays, sampling. Indices are built in numpy; the only Python loops run over rows.

Decode rows are padded to a *rung* and rows of one rung are one attention call. A rung depends on the row's own length
alone, so a row's result does not depend on its batch-mates: padding is masked and reads the null block's zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.batch import BatchRow, StepBatch

# An attention call costs as much as reading about this many positions of one row (30 layers, fp32, measured on CPU).
_SMALLEST_RUNG = 64


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What the index arrays of a layer depend on. ``window``: positions seen, None = all."""

    num_kv_heads: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Packed rows ``[first, first + count)``, one new token each, that read equally many blocks.

    ``blocks`` int32 ``[count, kv_heads, n]``; ``valid`` bool ``[count, 1, 1, n * block_size]``.
    """

    first: int
    count: int
    blocks: mx.array
    valid: mx.array


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """Packed rows ``[first, first + count)``: consecutive positions of one request.

    ``blocks`` int32 ``[1, kv_heads, n]`` hold ``num_keys`` positions, the chunk's own last.
    """

    first: int
    count: int
    blocks: mx.array
    num_keys: int
    mask: mx.array | Literal["causal"]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Index arrays for all layers of one kind. ``write_index`` int32 ``[T, kv_heads]``: flat pool rows."""

    write_index: mx.array
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[ChunkSpan, ...]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One forward pass: ``tokens`` int32 ``[T, 1]``, ``positions`` int32 ``[T]``.

    ``sampling_rows`` are the rows whose logits are wanted; ``head_rows`` int32 ``[R]`` is where their last tokens
    stand among the T.
    """

    tokens: mx.array
    positions: mx.array
    plans: dict[LayerKind, AttentionPlan]
    sampling_rows: tuple[BatchRow, ...]
    head_rows: mx.array


class InputBuilder:
    """Builds ``StepInputs`` for pools of ``num_blocks`` blocks (the null block comes after the last one)."""

    def __init__(self, kinds: Iterable[LayerKind], num_blocks: int, block_size: int) -> None:
        self._kinds = tuple(dict.fromkeys(kinds))
        self._null_block = num_blocks
        self._block_size = block_size

    def build(self, batch: StepBatch) -> StepInputs:
        """Index arrays for ``batch``; its rows may come in any order."""
        decodes = sorted((row for row in batch.rows if row.num_tokens == 1), key=lambda row: self._rung(row.start + 1))
        chunks = [row for row in batch.rows if row.num_tokens > 1]
        rows = decodes + chunks
        counts = np.array([row.num_tokens for row in rows])
        ends = np.cumsum(counts)
        tokens = np.concatenate([_tokens_of(row) for row in rows])
        positions = np.concatenate([np.arange(row.start, row.start + row.num_tokens) for row in rows])
        pool_rows = np.concatenate([self._pool_rows(row) for row in rows])
        head_rows = [end - 1 for row, end in zip(rows, ends, strict=True) if row.samples]
        return StepInputs(
            tokens=mx.array(tokens.astype(np.int32))[:, None],
            positions=mx.array(positions.astype(np.int32)),
            plans={kind: self._plan(kind, decodes, chunks, pool_rows) for kind in self._kinds},
            sampling_rows=tuple(row for row in rows if row.samples),
            head_rows=mx.array(np.array(head_rows, dtype=np.int32)),
        )

    def blocks_begun(self, row: BatchRow) -> list[int]:
        """Blocks whose first position ``row`` writes in this step."""
        first = -(-row.start // self._block_size)
        return list(row.block_ids[first : -(-(row.start + row.num_tokens) // self._block_size)])

    def _pool_rows(self, row: BatchRow) -> npt.NDArray[np.int64]:
        size = self._block_size
        first, last = row.start // size, (row.start + row.num_tokens - 1) // size
        blocks = np.array(row.block_ids[first : last + 1], dtype=np.int64)
        positions = np.arange(row.start, row.start + row.num_tokens)
        return blocks[positions // size - first] * size + positions % size

    def _plan(
        self, kind: LayerKind, decodes: list[BatchRow], chunks: list[BatchRow], pool_rows: npt.NDArray[np.int64]
    ) -> AttentionPlan:
        num_rows = (self._null_block + 1) * self._block_size
        write_index = pool_rows[:, None] + np.arange(kind.num_kv_heads) * num_rows
        groups, first = [], 0
        for num_blocks, members in groupby(decodes, key=lambda row: self._num_blocks_read(row, kind)):
            group = list(members)
            groups.append(self._group(kind, group, num_blocks, first))
            first += len(group)
        spans = []
        for row in chunks:
            spans.append(self._chunk(kind, row, first))
            first += row.num_tokens
        return AttentionPlan(mx.array(write_index.astype(np.int32)), tuple(groups), tuple(spans))

    def _group(self, kind: LayerKind, rows: Sequence[BatchRow], num_blocks: int, first: int) -> DecodeGroup:
        size = self._block_size
        table = np.full((len(rows), num_blocks), self._null_block, dtype=np.int64)
        lows = np.empty(len(rows), dtype=np.int64)
        highs = np.empty(len(rows), dtype=np.int64)
        for i, row in enumerate(rows):
            length = row.start + 1
            low = max(0, length - kind.window) if kind.window else 0
            first_block = low // size
            blocks = row.block_ids[first_block : -(-length // size)]
            table[i, : len(blocks)] = blocks
            lows[i], highs[i] = low - first_block * size, length - first_block * size
        position = np.arange(num_blocks * size)
        valid = (position >= lows[:, None]) & (position < highs[:, None])
        return DecodeGroup(first, len(rows), self._head_blocks(table, kind), mx.array(valid[:, None, None, :]))

    def _chunk(self, kind: LayerKind, row: BatchRow, first: int) -> ChunkSpan:
        size = self._block_size
        end = row.start + row.num_tokens
        first_block = max(0, row.start + 1 - kind.window) // size if kind.window else 0
        blocks = np.array(row.block_ids[first_block : -(-end // size)], dtype=np.int64)[None]
        num_keys = end - first_block * size
        mask: mx.array | Literal["causal"] = "causal"
        if kind.window is not None and end > kind.window:
            query = np.arange(row.start, end)[:, None]
            key = np.arange(first_block * size, end)[None]
            mask = mx.array((key <= query) & (key > query - kind.window))
        return ChunkSpan(first, row.num_tokens, self._head_blocks(blocks, kind), num_keys, mask)

    def _head_blocks(self, table: npt.NDArray[np.int64], kind: LayerKind) -> mx.array:
        heads = np.arange(kind.num_kv_heads)[:, None] * (self._null_block + 1)
        return mx.array((table[:, None, :] + heads).astype(np.int32))

    def _num_blocks_read(self, row: BatchRow, kind: LayerKind) -> int:
        length = row.start + 1
        low = max(0, length - kind.window) if kind.window else 0
        return -(-self._rung(length - low // self._block_size * self._block_size) // self._block_size)

    def _rung(self, length: int) -> int:
        """``length`` rounded up to one of eight steps per doubling: at most an eighth of the reads are padding."""
        step = max(_SMALLEST_RUNG, 1 << max(0, (length - 1).bit_length() - 4))
        return -(-length // step) * step


def _tokens_of(row: BatchRow) -> npt.NDArray[np.int64]:
    tokens = row.token_ids[row.start : row.start + row.num_tokens]
    assert len(tokens) == row.num_tokens, f"{row.request_id}: a token of this step is not known to the host"
    return np.array(tokens, dtype=np.int64)
