"""Saved recurrent states of models with recurrent layers: when one is saved, found and loaded.

Owns: how far a prefix hit reaches when state is needed too, and the saves and loads of each step. Must not know: blocks
and their pool, how a state is copied.

Unlike keys and values, a state stands for one length only, so a prefix is of use only where one was saved:

- at the last whole block of the tokens that a request came with, which an equal request and the next turn of its
  conversation have in common;
- where another request's blocks were found but no state: a branch point, and the next request may branch there, too;
- at the last whole block so far, while a long prompt is read and while it answers. A newer one replaces the one before,
  so what a request keeps does not grow with its length. It is what preemption and the next turn go on from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.batch import BatchRow, StateLoad
from engine.memory.kv_cache_manager import PrefixHit
from engine.memory.state_book import StateBook
from engine.scheduler.request_state import Request, RequestStates


@dataclass(frozen=True, slots=True)
class SavedState:
    """A save in a launched step."""

    request: Request
    entry: int
    num_tokens: int
    rolls: bool


class StateSnapshots:
    """Saved states of all requests. ``num_entries`` 0 (or no caching): prefixes are never shared."""

    def __init__(self, slots: int, num_entries: int, block_size: int, caching: bool) -> None:
        self.book = StateBook(slots, num_entries if caching else 0)
        self._block_size = block_size

    @property
    def shares(self) -> bool:
        """Whether any prefix can ever be shared."""
        return self.book.num_entries > 0

    def longest(self, hashes: Sequence[bytes], num_whole: int) -> int:
        """The most of the first ``num_whole`` blocks after which a state is saved."""
        while num_whole and not self.book.knows(hashes[num_whole - 1]):
            num_whole -= 1
        return num_whole

    def enter(self, request: Request, hit: PrefixHit) -> None:
        """A request gets a slot with this hit."""
        states, size = request.states, self._block_size
        if hit.num_tokens:
            states.to_load = self.book.pin(request.table.hashes[hit.num_tokens // size - 1])
        wanted = {(request.num_tokens - 1) // size * size, states.num_matched_tokens}
        states.points = frozenset(point for point in wanted if point > hit.num_tokens) if self.shares else frozenset()

    def leave(self, request: Request) -> None:
        """A request leaves its slot. What it saved can still be found."""
        states = request.states
        if states.to_load is not None:
            self.book.unpin(states.to_load)
        request.states = RequestStates()

    def loads(self, request: Request) -> list[StateLoad]:
        """What the request's next row starts from, if that is a saved state."""
        entry, request.states.to_load = request.states.to_load, None
        if entry is None:
            return []
        # Copies run in the order of launches, so whatever is saved to this entry later comes after the load.
        self.book.unpin(entry)
        return [StateLoad(entry, request.slot)]

    def saves(self, request: Request, row: BatchRow) -> list[SavedState]:
        """What is to be saved of the request's row."""
        if not self.shares:
            return []
        start, end = row.start, row.start + row.num_tokens
        lengths = {point for point in request.states.points if start < point <= end}
        if end % self._block_size == 0:
            lengths.add(end)
        saved = []
        for length in sorted(lengths):
            entry = self.book.reserve()
            if entry is not None:
                saved.append(SavedState(request, entry, length, length not in request.states.points))
        return saved

    def landed(self, saved: SavedState, still_runs: bool) -> None:
        """The step of a save is over. ``still_runs``: its row came out right and its request holds the slot."""
        if not still_runs:
            self.book.release(saved.entry)
            return
        request = saved.request
        block_hash = request.table.hashes[saved.num_tokens // self._block_size - 1]
        known = self.book.knows(block_hash)
        self.book.commit(saved.entry, block_hash)
        if saved.rolls:
            if request.states.rolling is not None:
                self.book.forget(request.states.rolling)
            request.states.rolling = None if known else block_hash
