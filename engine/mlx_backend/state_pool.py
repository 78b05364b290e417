"""Recurrent state of all slots, and saved copies of it: a fixed number of entries, whatever the lengths.

Owns: the arrays, reading and writing a pass's rows, copying entries. Must not know: which entry is whose; the entries
``[0, slots)`` are the slots' own and the rest are saved copies (engine/memory/state_book.py decides). Like the KV pool
the arrays are written by indexed assignment, which is in place while only the graph holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.mlx_backend.cache_layout import StateShape
from engine.mlx_backend.mlx_lm_parts import ArraysCache


@dataclass(frozen=True, slots=True)
class StateRows:
    """The entries of one pass's rows, int32 ``[B]``. ``fresh``: the one row begins its sequence and has no state."""

    entries: mx.array
    fresh: bool


class LayerStates:
    """All entries of one layer: an array ``[entries, *shape]`` for each of its cells."""

    def __init__(self, shape: StateShape, num_entries: int) -> None:
        self.cells = [None if cell is None else mx.zeros((num_entries, *cell[0]), cell[1]) for cell in shape.cells]

    def arrays(self) -> list[mx.array]:
        """What is held."""
        return [cell for cell in self.cells if cell is not None]

    def copy(self, sources: mx.array, targets: mx.array) -> None:
        """Copy whole entries, all read before any is written."""
        for cell in self.cells:
            if cell is not None:
                cell[targets] = cell[sources]


class StatePool:
    """Recurrent state of a model: ``num_entries`` for each of its recurrent layers."""

    def __init__(self, shapes: Sequence[StateShape], num_entries: int) -> None:
        self.layers = [LayerStates(shape, num_entries) for shape in shapes]
        mx.eval(self.arrays())

    def arrays(self) -> list[mx.array]:
        """All arrays, to evaluate at the end of each step."""
        return [array for layer in self.layers for array in layer.arrays()]

    @property
    def num_bytes(self) -> int:
        """All entries of all layers."""
        return sum(array.nbytes for array in self.arrays())

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy entries, given as (source, target)."""
        if pairs and self.layers:
            sources, targets = (mx.array(part) for part in np.array(pairs, np.int32).T)
            for layer in self.layers:
                layer.copy(sources, targets)


class StateHolder:
    """The rows that a model's recurrent layers compute now. One object per model, shared by its caches."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: StateRows | None = None


class StateCache(ArraysCache):
    """What a recurrent layer sees as its cache: its rows' state by index, as mlx-lm's ``ArraysCache`` gives it.

    A row that begins finds None, as in mlx-lm: models treat that differently from zeros. It is an ``ArraysCache``
    because some models ask for that type before they write.
    """

    lengths = None
    left_padding = None

    def __init__(self, states: LayerStates, holder: StateHolder) -> None:
        self._states, self._holder = states, holder
        self._new: dict[int, mx.array] = {}
        self._rows: StateRows | None = None

    def __getitem__(self, index: int) -> mx.array | None:
        cell = self._states.cells[index]  # an IndexError ends an iteration, as mlx-lm's own cache lets it
        rows = self._current()
        if index in self._new:
            return self._new[index]
        return None if cell is None or rows.fresh else cell[rows.entries]

    def __setitem__(self, index: int, value: mx.array) -> None:
        cell = self._states.cells[index]
        assert cell is not None, "the model sets a state that it did not set when it was inspected"
        rows = self._current()
        cell[rows.entries] = value.astype(cell.dtype)
        self._new[index] = value

    def make_mask(self, num_tokens: int) -> None:
        """No mask: rows of a pass are not padded."""

    def advance(self, num_tokens: int) -> None:
        """Nothing to do: lengths are the step's."""

    def empty(self) -> bool:
        """Whether the pass's row has no state yet."""
        return self._current().fresh

    def forget(self) -> None:
        """The pass's graph is built: only it holds the pass's arrays from now on, so that they go as it is computed."""
        self._rows, self._new = None, {}

    def _current(self) -> StateRows:
        rows = self._holder.rows
        assert rows is not None, "a state cache is used outside a step"
        if rows is not self._rows:
            self._rows, self._new = rows, {}
        return rows
