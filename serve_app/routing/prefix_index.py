"""Which replicas hold which beginnings of prompts. Pure.

Owns: the index from a beginning to its holders, by what replicas reported and by what is assumed since. Must not know:
costs, requests. Replicas are row numbers here.

A report is one or two seconds old when it arrives. So a prompt that was just sent somewhere is assumed to be there,
until a report says so or ``ASSUMED_FOR_S`` have passed; a prompt that the replica dropped or refused costs, in the
worst case, one wrong guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ASSUMED_FOR_S = 60.0


class PrefixIndex:
    """Beginnings and the rows that hold them."""

    def __init__(self) -> None:
        self._rows_by_name: dict[int, set[int]] = {}
        self._reported: dict[int, frozenset[int]] = {}
        self._assumed: dict[int, dict[int, float]] = {}

    def report(self, row: int, names: frozenset[int], now_s: float) -> None:
        """Row ``row`` holds ``names``, and of what is assumed only the young."""
        before = self._reported.get(row, frozenset())
        self._reported[row] = names
        assumed = self._assumed.get(row, {})
        settled = [name for name, until_s in assumed.items() if name in names or until_s <= now_s]
        for name in settled:
            del assumed[name]
        for name in names - before:
            self._rows_by_name.setdefault(name, set()).add(row)
        self._drop(row, (name for name in {*before, *settled} - names if name not in assumed))

    def assume(self, row: int, names: Sequence[int], now_s: float) -> None:
        """Row ``row`` is about to compute a prompt that begins like this."""
        reported = self._reported.get(row, frozenset())
        assumed = self._assumed.setdefault(row, {})
        for name in names:
            if name not in reported:
                assumed[name] = now_s + ASSUMED_FOR_S
                self._rows_by_name.setdefault(name, set()).add(row)

    def remove(self, row: int) -> None:
        """Row ``row`` is gone."""
        self._drop(row, {*self._reported.pop(row, ()), *self._assumed.pop(row, ())})

    def num_cached_tokens(self, names: Sequence[int], num_tokens: Sequence[int], num_rows: int) -> Floats:
        """Return for each row how many tokens of the prompt with these beginnings it holds."""
        cached = np.zeros(num_rows)
        # From short to long, so that the longest beginning that a row holds is written last.
        for name, end in zip(names, num_tokens, strict=True):
            rows = self._rows_by_name.get(name)
            if rows:
                cached[np.fromiter(rows, np.intp, len(rows))] = end
        return cached

    def _drop(self, row: int, names: Iterable[int]) -> None:
        for name in names:
            rows = self._rows_by_name[name]
            rows.discard(row)
            if not rows:
                del self._rows_by_name[name]
