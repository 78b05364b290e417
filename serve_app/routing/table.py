"""The replicas as a router sees them: one row each, in columns. Pure.

Owns: rows, and the figures that are used where a replica has measured none yet. Must not know: requests, costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from serve_app.routing.cost import Floats, Load
from serve_app.routing.local_map import Difference
from serve_app.routing.rendezvous import node_number
from serve_app.routing.report import ReplicaReport

# Until anybody in the fleet has measured anything. Only their ratio to each other matters then.
DEFAULT_PREFILL_TOKENS_PER_S = 500.0
DEFAULT_ANSWER_S = 5.0
_FIRST_CAPACITY = 8
_SMOOTHING = 0.05


@dataclass(slots=True)
class Columns:
    """One value for each row; rows that are not in use hold anything but ``exists``.

    ``num_requests`` and ``num_unread_tokens`` are as reported, ``more_*`` what this router adds to them. ``token_s``
    and ``row_s``: a token of an answer that is decoded alone, and what each row beside it adds. What is not measured
    yet is NaN.
    """

    exists: NDArray[np.bool_]
    usable: NDArray[np.bool_]
    draining: NDArray[np.bool_]
    nodes: NDArray[np.uint64]
    sequence: NDArray[np.int64]
    reported_s: Floats
    suspect_until_s: Floats
    slots: Floats
    num_requests: Floats
    num_unread_tokens: Floats
    prefill_tokens_per_s: Floats
    token_s: Floats
    row_s: Floats
    more_requests: Floats
    more_tokens: Floats

    @classmethod
    def of_length(cls, num_rows: int) -> Columns:
        """Return columns of ones: a row that is not in use must not divide by zero."""
        kinds = {"exists": np.bool_, "usable": np.bool_, "draining": np.bool_, "nodes": np.uint64, "sequence": np.int64}
        columns = cls(**{field.name: np.ones(num_rows, kinds.get(field.name, np.float64)) for field in fields(cls)})
        columns.exists[:] = False
        return columns

    def copy_to(self, other: Columns) -> None:
        """Write these rows to the first rows of ``other``."""
        for field in fields(self):
            values = getattr(self, field.name)
            getattr(other, field.name)[: len(values)] = values


class ReplicaTable:
    """Rows by replica. A row keeps its number as long as its replica is there; numbers are used again."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._names: list[str] = []
        self._usual_slots: float | None = None
        self._usual_speed: float | None = None
        self._usual_token_s: float | None = None
        self._usual_row_s: float | None = None
        self._usual_tokens: float | None = None
        self.columns = Columns.of_length(_FIRST_CAPACITY)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __contains__(self, replica: str) -> bool:
        return replica in self._rows

    @property
    def num_rows(self) -> int:
        """Rows in use or used before: the length of every column."""
        return len(self._names)

    def name_of(self, row: int) -> str:
        """Return the replica in ``row``."""
        return self._names[row]

    def row_of(self, replica: str) -> int:
        """Return the row of ``replica``."""
        return self._rows[replica]

    def add(self, replica: str, node_id: str, now_s: float) -> int:
        """Give ``replica`` a row. Until it reports it is idle, with slots and speeds that are usual in this fleet."""
        row = self._free.pop() if self._free else len(self._names)
        if row == len(self._names):
            self._names.append(replica)
            if row == len(self.columns.exists):
                longer = Columns.of_length(2 * row)
                self.columns.copy_to(longer)
                self.columns = longer
        self._rows[replica] = row
        self._names[row] = replica
        self.columns.exists[row] = True
        self.columns.nodes[row] = node_number(node_id)
        self.columns.sequence[row] = -1
        self.columns.suspect_until_s[row] = -np.inf
        self.correct(replica, Difference())
        self.report(replica, ReplicaReport(sequence=0, slots=round(self._usual_slots or 1)), now_s)
        return row

    def remove(self, replica: str) -> int:
        """Take the row of ``replica`` back and return its number."""
        row = self._rows.pop(replica)
        self.columns.exists[row] = False
        self._free.append(row)
        return row

    def report(self, replica: str, report: ReplicaReport, now_s: float) -> bool:
        """Take in a report; returns whether it is news."""
        row, columns = self._rows[replica], self.columns
        if report.sequence <= columns.sequence[row]:
            return False
        columns.sequence[row] = report.sequence
        columns.reported_s[row] = now_s
        columns.slots[row] = max(1, report.slots)
        columns.num_requests[row] = report.num_running + report.num_waiting
        columns.num_unread_tokens[row] = report.num_unread_tokens
        columns.usable[row] = report.ready and report.slots > 0
        columns.draining[row] = report.draining
        self._usual_slots = _smoothed(self._usual_slots, report.slots or None if report.sequence else None)
        self._usual_speed = _smoothed(self._usual_speed, report.prefill_tokens_per_s)
        self._usual_tokens = _smoothed(self._usual_tokens, report.answer_tokens)
        token_s, row_s = self._decoding(report)
        self._usual_token_s = _smoothed(self._usual_token_s, token_s)
        self._usual_row_s = _smoothed(self._usual_row_s, row_s)
        columns.prefill_tokens_per_s[row] = report.prefill_tokens_per_s or np.nan
        columns.token_s[row] = np.nan if token_s is None else token_s
        columns.row_s[row] = np.nan if row_s is None else row_s
        return True

    def _decoding(self, report: ReplicaReport) -> tuple[float | None, float | None]:
        """Seconds for a token of an answer that is alone there, and those that each row beside it adds. What is beside
        one now, this router knows better than the report."""
        if report.answer_s is None:
            return None, None
        num_tokens = report.answer_tokens or self._usual_tokens or 1.0
        row_s = report.answer_row_s or 0.0
        num_beside = max(0, min(report.num_running, report.slots - 1))
        return max(report.answer_s - row_s * num_beside, 0.0) / num_tokens, row_s / num_tokens

    def correct(self, replica: str, difference: Difference) -> None:
        """Set what is to be added to the replica's last report."""
        row = self._rows[replica]
        self.columns.more_requests[row] = difference.num_requests
        self.columns.more_tokens[row] = difference.num_tokens

    def load(self, now_s: float) -> Load:
        """Return the columns that costs are made of."""
        n, columns = self.num_rows, self.columns
        # An answer has the same length wherever it is given: by its own usual length a Mac that has given long ones
        # would look slow.
        num_tokens = self._usual_tokens or 1.0
        return Load(
            slots=columns.slots[:n],
            num_requests=np.maximum(columns.num_requests[:n] + columns.more_requests[:n], 0.0),
            num_unread_tokens=columns.num_unread_tokens[:n] + columns.more_tokens[:n],
            prefill_tokens_per_s=_known(
                columns.prefill_tokens_per_s[:n], self._usual_speed or DEFAULT_PREFILL_TOKENS_PER_S
            ),
            alone_s=num_tokens * _known(columns.token_s[:n], self._usual_token_s or DEFAULT_ANSWER_S / num_tokens),
            row_s=num_tokens * _known(columns.row_s[:n], self._usual_row_s or 0.0),
            age_s=now_s - columns.reported_s[:n],
        )


def _known(values: Floats, usual: float) -> Floats:
    """What is not measured yet is as usual now, whenever it was reported: else replicas could not be compared."""
    return np.where(np.isnan(values), usual, values)


def _smoothed(before: float | None, value: float | None) -> float | None:
    if value is None or before is None:
        return value if before is None else before
    return before + _SMOOTHING * (value - before)
