"""Turns a step's rows into the arrays of a GPU step: decode rows padded to a rung, then prompt chunks.

Owns: the packed order and everything the kernels index by. Must not know: the model, the pools, when a step runs.

Decode rows keep the scheduler's order and come first; rows of padding have length 0, which the kernels skip. A token
that the host does not know yet is -1 and is taken from ``last_tokens`` on the device, at the row's slot.

Chunks come in one of two forms. *Paged*: tokens padded to a rung, and all else in arrays, so that a step's shape says
nothing of positions and steps recur. *Gathered* (where the chunk attention kernel is not used): each chunk's length and
start are part of the shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.batch import BatchRow, StepBatch
from engine.memory.window_blocks import HOLE
from engine.mlx_backend.noise import key_words
from engine.mlx_backend.rungs import rung_for, table_width, token_rung
from engine.mlx_backend.speculation import sampling_places
from engine.mlx_backend.uploads import Layout, pack

_LEAST_TABLE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """What is fixed about a gathered chunk: packed rows ``[first, first + count)``, positions from ``start``."""

    first: int
    count: int
    start: int


@dataclass(frozen=True, slots=True)
class StepShape:
    """What is fixed about a step. ``layout`` says where its arrays lie in the upload."""

    layout: Layout
    num_decode_rows: int
    num_chunk_rows: int = 0
    gathered: tuple[ChunkShape, ...] = ()


@dataclass(frozen=True, slots=True)
class HostStep:
    """A step as the host hands it over.

    ``head_rows[i]`` is the request of the i-th row of logits, None is padding; ``settings`` fp32 [3, R] (temperature,
    top_p, min_p) and ``limits`` int32 [R] (top_k) are on the upload too.
    """

    shape: StepShape
    upload: mx.array
    head_rows: tuple[BatchRow | None, ...]
    settings: npt.NDArray[np.float32]
    limits: npt.NDArray[np.int32]


WINDOW_PREFIX = "window_"
"""Before the names of block tables and targets of sliding-window layers, where those have a pool of their own."""


class GpuInputBuilder:
    """Builds steps for pools of ``block_size`` positions a block and contexts of up to ``max_model_len``.

    ``num_window_blocks``: the pools of sliding-window layers hold so many, under block tables of their own.
    """

    def __init__(
        self,
        *,
        block_size: int,
        max_model_len: int,
        slots: int,
        vocab_size_tokens: int,
        windows: Iterable[int],
        pages_chunks: bool,
        num_window_blocks: int | None = None,
    ) -> None:
        self._block_size = block_size
        self._least_width = max(1, _LEAST_TABLE_TOKENS // block_size)
        self._max_width = -(-max_model_len // block_size)
        self._slots = slots
        self._vocab_size_tokens = vocab_size_tokens
        self._windows = tuple(sorted(set(windows)))
        self._tables = {"": _SlotTables(slots, self._max_width)}
        # A hole reads as the null block behind the pool's last: chunk attention may load what is behind a window.
        self._null_window_block = num_window_blocks or 0
        if num_window_blocks is not None:
            self._tables[WINDOW_PREFIX] = _SlotTables(slots, self._max_width, num_window_blocks)
        self.pages_chunks = pages_chunks
        self.rung_times_s: Mapping[int, float] = {}

    def build(self, batch: StepBatch) -> HostStep:
        """Arrays of ``batch``, packed for one upload."""
        decodes = [row for row in batch.rows if row.num_tokens == 1]
        chunks = [row for row in batch.rows if row.num_tokens > 1]
        if not chunks:
            num_rows = rung_for(len(decodes), self.rung_times_s)
            return self._packed(self._decode_arrays(decodes, num_rows), num_rows, _padded(decodes, num_rows))
        # With chunks the matrix products are large: padding of decode rows is cheap, more compiled steps are not.
        num_rows = rung_for(self._slots) if decodes and self.pages_chunks else len(decodes)
        arrays = self._decode_arrays(decodes, num_rows)
        build_chunks = self._paged if self.pages_chunks else self._gathered
        return build_chunks(arrays, num_rows, _padded(decodes, num_rows), chunks)

    def empty(self, num_rows: int, num_tokens: int = 0) -> HostStep:
        """A step of padding: ``num_rows`` decode rows and ``num_tokens`` tokens of a chunk.

        Everything but attention costs what it will cost.
        """
        arrays = self._decode_arrays([], num_rows)
        if not num_tokens:
            return self._packed(arrays, num_rows, (None,) * num_rows)
        arrays |= self._chunk_arrays([], num_tokens, 1)
        arrays["head_index"] = np.arange(num_rows + 1, dtype=np.int32)
        return self._packed(arrays, num_rows, (None,) * (num_rows + 1), num_tokens)

    def _paged(
        self,
        arrays: dict[str, npt.NDArray[np.generic]],
        num_rows: int,
        decode_rows: tuple[BatchRow | None, ...],
        chunks: list[BatchRow],
    ) -> HostStep:
        num_tokens = sum(row.num_tokens for row in chunks)
        num_padded = token_rung(num_tokens)
        heads = _chunk_heads(chunks, num_rows)
        num_chunks, num_heads = _power_of_two(len(chunks)), _power_of_two(len(heads))
        arrays |= self._chunk_arrays(chunks, num_padded, num_chunks)
        # Where nobody samples, any row will do.
        head_index = np.full(num_rows + num_heads, num_rows, np.int32)
        head_index[:num_rows] = np.arange(num_rows)
        head_index[num_rows : num_rows + len(heads)] = [place for place, _ in heads]
        arrays["head_index"] = head_index
        head_rows = (*decode_rows, *_padded([row for _, row in heads], num_heads))
        return self._packed(arrays, num_rows, head_rows, num_padded)

    def _chunk_arrays(
        self, chunks: Sequence[BatchRow], num_padded: int, num_chunks: int
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Tokens of all chunks and, per chunk, its rows, its first position and its block table."""
        tokens, positions = np.zeros(num_padded, np.int32), np.zeros(num_padded, np.int32)
        targets = {prefix: np.full(num_padded, -1, np.int32) for prefix in self._tables}
        spans = np.zeros((num_chunks, 3), np.int32)
        # As wide as can be: the kernel reads what it needs, and a narrower table would be one more compiled step.
        tables = {prefix: np.zeros((num_chunks, self._max_width), np.int32) for prefix in self._tables}
        first = 0
        for i, row in enumerate(chunks):
            rows = slice(first, first + row.num_tokens)
            tokens[rows], positions[rows] = tokens_of(row), _positions(row)
            spans[i] = first, row.num_tokens, row.start
            for prefix in self._tables:
                blocks = self._blocks(row, prefix)
                tables[prefix][i, : len(blocks)] = blocks
                targets[prefix][rows] = self._places(row, blocks)
            first = rows.stop
        return {
            "chunk_tokens": tokens,
            "chunk_positions": positions,
            "chunks": spans,
            **{f"{prefix}chunk_targets": array for prefix, array in targets.items()},
            **{f"{prefix}chunk_tables": array for prefix, array in tables.items()},
        }

    def _gathered(
        self,
        arrays: dict[str, npt.NDArray[np.generic]],
        num_rows: int,
        decode_rows: tuple[BatchRow | None, ...],
        chunks: list[BatchRow],
    ) -> HostStep:
        shapes: list[ChunkShape] = []
        first = num_rows
        for index, row in enumerate(chunks):
            shapes.append(ChunkShape(first, row.num_tokens, row.start))
            arrays |= {f"{name}{index}": array for name, array in self._spans(row).items()}
            first += row.num_tokens
        arrays["chunk_tokens"] = np.concatenate([tokens_of(row) for row in chunks])
        arrays["chunk_positions"] = np.concatenate([_positions(row) for row in chunks])
        for prefix in self._tables:
            places = [self._places(row, self._blocks(row, prefix)) for row in chunks]
            arrays[f"{prefix}chunk_targets"] = np.concatenate(places)
        heads = [(place, row) for place, row in _chunk_heads(chunks, num_rows) if row is not None]
        arrays["head_index"] = np.array([*range(num_rows), *(place for place, _ in heads)], np.int32)
        head_rows = (*decode_rows, *(row for _, row in heads))
        return self._packed(arrays, num_rows, head_rows, first - num_rows, tuple(shapes))

    def _decode_arrays(self, rows: Sequence[BatchRow], num_rows: int) -> dict[str, npt.NDArray[np.generic]]:
        if not num_rows:
            return {}
        lengths = np.zeros(num_rows, np.int32)
        tokens = np.zeros(num_rows, np.int32)
        slots = np.full(num_rows, self._slots, np.int32)  # padding scatters its token behind the last slot
        lengths[: len(rows)] = [row.start + 1 for row in rows]
        tokens[: len(rows)] = [row.token_ids[row.start] if len(row.token_ids) > row.start else -1 for row in rows]
        slots[: len(rows)] = [row.slot for row in rows]
        needed = -(-int(lengths.max(initial=1)) // self._block_size)
        width = table_width(needed, self._least_width, self._max_width)
        tables = {
            f"{prefix}table": known.of([_block_ids(row, prefix) for row in rows], slots, width)
            for prefix, known in self._tables.items()
        }
        return {"tokens": tokens, "slots": slots, "lengths": lengths, **tables}

    def _packed(
        self,
        arrays: dict[str, npt.NDArray[np.generic]],
        num_rows: int,
        head_rows: tuple[BatchRow | None, ...],
        num_chunk_rows: int = 0,
        gathered: tuple[ChunkShape, ...] = (),
    ) -> HostStep:
        """``arrays`` and those for sampling ``head_rows``, in one upload."""
        R = len(head_rows)
        settings = np.zeros((3, R), np.float32)
        settings[1] = 1.0
        limits = np.full(R, self._vocab_size_tokens, np.int32)
        keys = np.zeros((2, R), np.uint32)
        head_slots = np.full(R, self._slots, np.int32)
        for i, row in enumerate(head_rows):
            if row is None:
                continue
            head_slots[i] = row.slot if row.samples else self._slots
            sampling = row.sampling
            if sampling.greedy:
                continue
            settings[:, i] = sampling.temperature, sampling.top_p, sampling.min_p
            limits[i] = min(sampling.top_k or self._vocab_size_tokens, self._vocab_size_tokens)
            keys[:, i] = key_words(row.seed, row.output_index)
        arrays |= {"settings": settings, "limits": limits, "keys": keys.view(np.int32), "head_slots": head_slots}
        layout, upload = pack(arrays)
        return HostStep(StepShape(layout, num_rows, num_chunk_rows, gathered), upload, head_rows, settings, limits)

    def _blocks(self, row: BatchRow, prefix: str) -> npt.NDArray[np.int32]:
        """The row's blocks up to the step's end."""
        num_blocks = -(-(row.start + row.num_tokens) // self._block_size)
        blocks = np.array(_block_ids(row, prefix)[:num_blocks], np.int32)
        return np.where(blocks == HOLE, self._null_window_block, blocks)

    def _spans(self, row: BatchRow) -> dict[str, npt.NDArray[np.generic]]:
        """Block table and, per window, the span of positions to gather: first, last + 1, count."""
        end = row.start + row.num_tokens
        arrays: dict[str, npt.NDArray[np.generic]] = {
            f"{prefix}chunk_table": self._blocks(row, prefix) for prefix in self._tables
        }
        for window in self._windows:
            first = chunk_context_start(row.start, window, self._block_size)
            arrays[f"span_{window}_"] = np.array([first, end, end - first], np.int32)
        return arrays

    def _places(self, row: BatchRow, blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        position = _positions(row)
        return blocks[position // self._block_size] * self._block_size + position % self._block_size


class _SlotTables:
    """Block tables by slot, brought up to date by what was appended: copying every table in every step would take
    longer than all else that the host does for it. A list of blocks only grows, but for holes behind the window, which
    no decode row reads; a request that starts anew has a new one (``BatchRow``). ``null_block`` stands for a hole."""

    def __init__(self, num_slots: int, width: int, null_block: int = 0) -> None:
        self._null_block = null_block
        self._blocks = np.zeros((num_slots + 1, width), np.int32)  # the last row stays zero, for padding
        self._sources: list[Sequence[int] | None] = [None] * num_slots
        self._num_known = [0] * num_slots

    def of(self, block_ids: Sequence[Sequence[int]], slots: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.int32]:
        """The rows' ``block_ids``, which have the first of ``slots``, as [len(slots), width], padding included."""
        for slot, blocks in zip(slots.tolist(), block_ids, strict=False):
            if self._sources[slot] is not blocks or len(blocks) < self._num_known[slot]:
                self._sources[slot], self._num_known[slot] = blocks, 0
            known = self._num_known[slot]
            if len(blocks) > known:
                new = np.array(blocks[known:], np.int32)
                self._blocks[slot, known : len(blocks)] = np.where(new == HOLE, self._null_block, new)
                self._num_known[slot] = len(blocks)
        return self._blocks[slots, :width]


def chunk_context_start(start: int, window: int, block_size: int) -> int:
    """First position that a chunk from ``start`` gathers: its first token's window, down to a whole block."""
    return max(0, start + 1 - window) // block_size * block_size if window else 0


def _block_ids(row: BatchRow, prefix: str) -> Sequence[int]:
    return row.window_block_ids if prefix == WINDOW_PREFIX else row.block_ids


def _padded(rows: Sequence[BatchRow | None], count: int) -> tuple[BatchRow | None, ...]:
    return (*rows, *(None,) * (count - len(rows)))


def _chunk_heads(chunks: Sequence[BatchRow], num_rows: int) -> list[tuple[int, BatchRow | None]]:
    """Packed rows whose logits are wanted, and for whom: each chunk's last one, and one more for each guess before it.
    The last row of a chunk that does not sample is nobody's."""
    heads: list[tuple[int, BatchRow | None]] = []
    end = num_rows
    for row in chunks:
        end += row.num_tokens
        places = sampling_places(row) if row.samples else [None]
        heads += [(end - len(places) + index, place) for index, place in enumerate(places)]
    return heads


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def tokens_of(row: BatchRow) -> npt.NDArray[np.int32]:
    """A chunk's tokens, which the host knows, and guesses behind them."""
    tokens = [*row.token_ids[row.start : row.start + row.num_tokens], *row.draft_token_ids]
    assert len(tokens) == row.num_tokens, f"{row.request_id}: a prompt chunk's tokens are not known to the host"
    return np.array(tokens, np.int32)


def _positions(row: BatchRow) -> npt.NDArray[np.int32]:
    return np.arange(row.start, row.start + row.num_tokens, dtype=np.int32)
