"""Turns a step's rows into the index arrays of one forward pass.

Owns: the packed order (decode rows, then chunks), positions, pool rows to write, what each row reads. Must not know:
the model, the pool's arrays, sampling. Indices are built in numpy; the only Python loops run over rows.

A decode row is read in one of two ways. Where its blocks lie side by side it is read where it stands, by a call of its
own. Otherwise its blocks are gathered, padded to a *rung* with the null block's zeros, and rows of one rung share a
call; short rows share one anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.batch import BatchRow, StepBatch
from engine.mlx_backend.speculation import sampling_places

# Measured on the CPU, fp32, heads of 64: a call of its own costs a row as much as padding 64 positions, and gathering
# costs as much as attending. So short rows share a call, and long ones avoid the copy.
_SMALLEST_RUNG = 64
_LONGEST_SHARED = 128
# Stands for a token that is still being computed.
_IN_FLIGHT = -1


class Grouping(Enum):
    """How the rows of a forward pass are read.

    ``PACKED``: each as it costs least. ``TOGETHER``: decode rows all in one part, so that their keys are one array.
    ``SEQUENCE``: the one row as consecutive positions, even where it is a single token.
    """

    PACKED = "packed"
    TOGETHER = "together"
    SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What the index arrays of a layer depend on. ``window``: positions seen, None = all."""

    num_kv_heads: int
    window: int | None = None


class BlockKey(NamedTuple):
    """A block by its pool: that of sliding-window layers, where it is one of their own, or that of the others."""

    of_window: bool
    block_id: int


@dataclass(frozen=True, slots=True)
class Run:
    """Pool rows ``[first, first + count)`` of every head: positions that lie side by side, read without a copy."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class DecodePart:
    """Packed rows ``[first, first + count)``, one new token each.

    ``source``: a run (one row), or blocks int32 ``[count, kv_heads, n]`` of which ``valid`` bool
    ``[count, 1, 1, n * block_size]`` says what is seen.
    """

    first: int
    count: int
    source: Run | mx.array
    valid: mx.array | None = None


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Packed rows ``[first, first + count)``: consecutive positions of one request.

    ``source``: a run, or blocks int32 ``[1, kv_heads, n]``; it begins with ``num_keys`` positions, the chunk's last.
    ``mask`` bool ``[count, num_keys]``, None = causal.
    """

    first: int
    count: int
    source: Run | mx.array
    num_keys: int
    mask: mx.array | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Index arrays for all layers of one kind. ``write_index`` int32 ``[T, kv_heads]``: flat pool rows."""

    write_index: mx.array
    decodes: tuple[DecodePart, ...]
    chunks: tuple[ChunkPart, ...]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One forward pass: ``tokens`` int32 ``[T, 1]``, ``positions`` int32 ``[T]``.

    ``rows`` in packed order; ``sampling_rows`` are those whose logits are wanted; ``head_rows`` int32 ``[R]`` is where
    their last tokens stand among the T.
    """

    tokens: mx.array
    positions: mx.array
    plans: dict[LayerKind, AttentionPlan]
    rows: tuple[BatchRow, ...]
    sampling_rows: tuple[BatchRow, ...]
    head_rows: mx.array


@dataclass(frozen=True, slots=True)
class _Table:
    """A row with the blocks that hold its positions up to the step's end, and those of sliding-window layers."""

    row: BatchRow
    blocks: npt.NDArray[np.int64]
    window_blocks: npt.NDArray[np.int64]

    @property
    def end(self) -> int:
        return self.row.start + self.row.num_tokens

    @property
    def side_by_side(self) -> bool:
        return _side_by_side(self.blocks)


class InputBuilder:
    """Builds ``StepInputs`` for pools of ``num_blocks`` blocks (the null block comes after the last one).

    ``num_window_blocks``: the pools of sliding-window layers hold so many, under block tables of their own; None where
    they are like all others.
    """

    def __init__(
        self, kinds: Iterable[LayerKind], num_blocks: int, block_size: int, num_window_blocks: int | None = None
    ) -> None:
        self._kinds = tuple(dict.fromkeys(kinds))
        self._num_blocks = num_blocks
        self._num_window_blocks = num_window_blocks
        self._block_size = block_size

    def build(
        self, batch: StepBatch, last_tokens: mx.array | None = None, grouping: Grouping = Grouping.PACKED
    ) -> StepInputs:
        """Index arrays for ``batch``; its rows may come in any order.

        ``last_tokens`` int32 ``[slots]``: the token sampled last in each slot, for rows whose token is in flight.
        """
        tables = [self._table(row) for row in batch.rows]
        chunks, shared = _split(tables, lambda table: table.row.num_tokens > 1 or grouping is Grouping.SEQUENCE)
        runs: list[_Table] = []
        if grouping is Grouping.PACKED:
            runs, shared = _split(shared, lambda table: table.end > _LONGEST_SHARED and table.side_by_side)
            shared.sort(key=lambda table: rung(table.end))
        ordered = runs + shared + chunks
        rows = [table.row for table in ordered]
        ends = np.cumsum([row.num_tokens for row in rows])
        positions = [np.arange(row.start, row.start + row.num_tokens) for row in rows]
        head_rows = [
            end - 1 - back
            for row, end in zip(rows, ends, strict=True)
            if row.samples
            for back in range(len(row.draft_token_ids), -1, -1)
        ]
        return StepInputs(
            tokens=tokens_of_rows(rows, last_tokens)[:, None],
            positions=mx.array(np.concatenate(positions).astype(np.int32)),
            plans={kind: self._plan(kind, runs, self._groups(kind, shared, grouping), chunks) for kind in self._kinds},
            rows=tuple(rows),
            sampling_rows=tuple(place for row in rows if row.samples for place in sampling_places(row)),
            head_rows=mx.array(np.array(head_rows, dtype=np.int32)),
        )

    def blocks_begun(self, row: BatchRow) -> list[BlockKey]:
        """Blocks whose first position ``row`` writes in this step."""
        span = slice(-(-row.start // self._block_size), self._num_blocks_of(row))
        begun = [BlockKey(False, block_id) for block_id in row.block_ids[span]]
        return begun + [BlockKey(True, block_id) for block_id in row.window_block_ids[span]]

    def _num_blocks_of(self, row: BatchRow) -> int:
        return -(-(row.start + row.num_tokens) // self._block_size)

    def _table(self, row: BatchRow) -> _Table:
        num_blocks = self._num_blocks_of(row)
        window_blocks = row.window_block_ids[:num_blocks] if self._num_window_blocks is not None else ()
        return _Table(
            row, np.array(row.block_ids[:num_blocks], dtype=np.int64), np.array(window_blocks, dtype=np.int64)
        )

    def _is_apart(self, kind: LayerKind) -> bool:
        return kind.window is not None and self._num_window_blocks is not None

    def _null_block(self, kind: LayerKind) -> int:
        """The block of zeros in the pools of this kind."""
        if kind.window is not None and self._num_window_blocks is not None:
            return self._num_window_blocks
        return self._num_blocks

    def _blocks(self, table: _Table, kind: LayerKind) -> npt.NDArray[np.int64]:
        return table.window_blocks if self._is_apart(kind) else table.blocks

    def _pool_rows(self, table: _Table, kind: LayerKind) -> npt.NDArray[np.int64]:
        size, positions = self._block_size, np.arange(table.row.start, table.end)
        return self._blocks(table, kind)[positions // size] * size + positions % size

    def _plan(
        self,
        kind: LayerKind,
        runs: Sequence[_Table],
        groups: Iterable[tuple[int, list[_Table]]],
        chunks: Sequence[_Table],
    ) -> AttentionPlan:
        heads = np.arange(kind.num_kv_heads) * (self._null_block(kind) + 1) * self._block_size
        decodes: list[DecodePart] = []
        parts: list[ChunkPart] = []
        written: list[npt.NDArray[np.int64]] = []
        first = 0
        for num_blocks, members in [*((self._num_blocks_read(run, kind), [run]) for run in runs), *groups]:
            decodes.append(self._shared_part(kind, members, num_blocks, first))
            written += [self._pool_rows(table, kind) for table in members]
            first += len(members)
        for table in chunks:
            parts.append(self._chunk_part(kind, table, first))
            written.append(self._pool_rows(table, kind))
            first += table.row.num_tokens
        write_index = mx.array((np.concatenate(written)[:, None] + heads).astype(np.int32))
        return AttentionPlan(write_index, tuple(decodes), tuple(parts))

    def _groups(
        self, kind: LayerKind, tables: Sequence[_Table], grouping: Grouping
    ) -> Iterable[tuple[int, list[_Table]]]:
        """Rows that share a call, with the number of blocks that are read for each of them."""
        if grouping is Grouping.PACKED:
            parts = groupby(tables, key=lambda table: self._num_blocks_read(table, kind))
            return [(num_blocks, list(group)) for num_blocks, group in parts]
        return [(max(self._num_blocks_read(table, kind) for table in tables), list(tables))] if tables else []

    def _run(self, table: _Table, kind: LayerKind, first_position: int) -> Run | None:
        """Positions from ``first_position`` on, where their blocks lie side by side."""
        first_block, offset = divmod(first_position, self._block_size)
        blocks = self._blocks(table, kind)[first_block:]
        if not _side_by_side(blocks):
            return None
        return Run(int(blocks[0]) * self._block_size + offset, table.end - first_position)

    def _shared_part(self, kind: LayerKind, tables: Sequence[_Table], num_blocks: int, first: int) -> DecodePart:
        if len(tables) == 1 and (run := self._run(tables[0], kind, _first_seen(tables[0], kind))) is not None:
            return DecodePart(first, 1, run)
        size = self._block_size
        blocks = np.full((len(tables), num_blocks), self._null_block(kind), dtype=np.int64)
        seen = np.empty((len(tables), 2), dtype=np.int64)
        for i, table in enumerate(tables):
            first_position = _first_seen(table, kind)
            first_block = first_position // size
            own = self._blocks(table, kind)[first_block:]
            blocks[i, : len(own)] = own
            seen[i] = first_position - first_block * size, table.end - first_block * size
        position = np.arange(num_blocks * size)
        valid = (position >= seen[:, :1]) & (position < seen[:, 1:])
        return DecodePart(first, len(tables), self._head_blocks(blocks, kind), mx.array(valid[:, None, None, :]))

    def _chunk_part(self, kind: LayerKind, table: _Table, first: int) -> ChunkPart:
        size, row, end = self._block_size, table.row, table.end
        # The chunk's first token sees furthest back.
        first_position = max(0, row.start + 1 - kind.window) if kind.window else 0
        first_block = first_position // size
        begin = first_block * size
        source: Run | mx.array | None = self._run(table, kind, begin)
        if source is None:
            source = self._head_blocks(self._blocks(table, kind)[None, first_block:], kind)
        mask: mx.array | None = None
        if kind.window is not None and end > kind.window:
            query, key = np.arange(row.start, end)[:, None], np.arange(begin, end)[None]
            mask = mx.array((key <= query) & (key > query - kind.window))
        return ChunkPart(first, row.num_tokens, source, end - begin, mask)

    def _head_blocks(self, blocks: npt.NDArray[np.int64], kind: LayerKind) -> mx.array:
        heads = np.arange(kind.num_kv_heads)[:, None] * (self._null_block(kind) + 1)
        return mx.array((blocks[:, None, :] + heads).astype(np.int32))

    def _num_blocks_read(self, table: _Table, kind: LayerKind) -> int:
        size = self._block_size
        return -(-rung(table.end - _first_seen(table, kind) // size * size) // size)


def _side_by_side(blocks: npt.NDArray[np.int64]) -> bool:
    return bool((np.diff(blocks) == 1).all())


def rung(length: int) -> int:
    """``length`` rounded up to one of eight steps per doubling: at most an eighth of what is read is padding."""
    step = max(_SMALLEST_RUNG, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step


def _split(tables: Sequence[_Table], wanted: Callable[[_Table], bool]) -> tuple[list[_Table], list[_Table]]:
    chosen: list[_Table] = []
    rest: list[_Table] = []
    for table in tables:
        (chosen if wanted(table) else rest).append(table)
    return chosen, rest


def _first_seen(table: _Table, kind: LayerKind) -> int:
    """The first position that the row's last token attends to."""
    return max(0, table.end - kind.window) if kind.window else 0


def tokens_of_rows(rows: Sequence[BatchRow], last_tokens: mx.array | None) -> mx.array:
    """Tokens int32 ``[T]`` of the rows one after another, those in flight from ``last_tokens`` ``[slots]``."""
    known = mx.array(np.concatenate([_tokens_of(row) for row in rows]))
    waiting = [row.slot for row in rows if len(row.token_ids) == row.start]
    if not waiting:
        return known
    assert last_tokens is not None, "a row's token is not known to the host"
    slots = mx.array(np.repeat([row.slot for row in rows], [row.num_tokens for row in rows]).astype(np.int32))
    return mx.where(known == _IN_FLIGHT, last_tokens[slots], known)


def _tokens_of(row: BatchRow) -> npt.NDArray[np.int32]:
    tokens = [*row.token_ids[row.start : row.start + row.num_tokens], *row.draft_token_ids]
    if not tokens and row.num_tokens == 1:
        tokens = [_IN_FLIGHT]
    assert len(tokens) == row.num_tokens, f"{row.request_id}: a token of this chunk is not known to the host"
    return np.array(tokens, dtype=np.int32)
