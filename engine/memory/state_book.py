"""Saved recurrent states as numbers: which entry holds the state after which prefix, and which may be reused.

Owns: a fixed number of entries, the hash each is found by, the order of eviction. An entry is in one of three states:

    free      nothing is known of it
    pending   a launched step saves to it; not yet to be found
    saved     found by the hash of the block that ends its prefix; evicted least recently used first, unless pinned

Every operation is O(1), but for skipping pinned entries when one is evicted. Must not know: tokens, requests, or what
the entries hold. A state after n tokens is of use only together with the keys and values of those tokens, which the
block pool keeps under the same hashes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict


class StateBook:
    """Entries ``first_entry .. first_entry + num_entries - 1``; the ones before are the slots' own states."""

    def __init__(self, first_entry: int, num_entries: int) -> None:
        self._entries = range(first_entry, first_entry + num_entries)
        self._free = list(reversed(self._entries))
        self._pending: set[int] = set()
        self._hash_of: OrderedDict[int, bytes] = OrderedDict()
        self._entry_of: dict[bytes, int] = {}
        self._pins: Counter[int] = Counter()

    @property
    def num_entries(self) -> int:
        """All entries."""
        return len(self._entries)

    @property
    def num_saved(self) -> int:
        """Entries that can be found."""
        return len(self._hash_of)

    def knows(self, block_hash: bytes) -> bool:
        """Whether the state after the prefix that ends with this block is saved."""
        return block_hash in self._entry_of

    def pin(self, block_hash: bytes) -> int:
        """The entry with this state, kept until it is unpinned."""
        entry = self._entry_of[block_hash]
        self._hash_of.move_to_end(entry)
        self._pins[entry] += 1
        return entry

    def unpin(self, entry: int) -> None:
        """The state was loaded, or is not wanted any more."""
        assert self._pins[entry] > 0, f"entry {entry} is unpinned more often than pinned"
        self._pins[entry] -= 1

    def reserve(self) -> int | None:
        """An entry to save to, pending from now on; None when all are pending or pinned."""
        if not self._free and not self._evict_oldest():
            return None
        entry = self._free.pop()
        self._pending.add(entry)
        return entry

    def commit(self, entry: int, block_hash: bytes) -> None:
        """The step that saved to ``entry`` is over. The first entry with a state keeps the name."""
        self._pending.remove(entry)
        if block_hash in self._entry_of:
            self._hash_of.move_to_end(self._entry_of[block_hash])
            self._free.append(entry)
            return
        self._entry_of[block_hash] = entry
        self._hash_of[entry] = block_hash

    def release(self, entry: int) -> None:
        """What was to be saved is not of use."""
        self._pending.remove(entry)
        self._free.append(entry)

    def forget(self, block_hash: bytes) -> None:
        """Give up a saved state that a newer one replaces, unless somebody is about to load it."""
        entry = self._entry_of.get(block_hash)
        if entry is not None and not self._pins[entry]:
            self._remove(entry)

    def check_invariants(self) -> None:
        """Raise AssertionError naming what does not add up."""
        kinds = [set(self._free), self._pending, set(self._hash_of)]
        assert len(self._free) == len(kinds[0]), "a state entry is free twice"
        assert sum(map(len, kinds)) == len(self._entries), "a state entry is lost"
        assert set().union(*kinds) == set(self._entries), "a state entry is in two states"
        named = {block_hash: entry for entry, block_hash in self._hash_of.items()}
        assert named == self._entry_of, "a saved state is found under a foreign hash"
        assert all(entry in self._hash_of for entry, pins in self._pins.items() if pins), "a lost entry is pinned"

    def _evict_oldest(self) -> bool:
        oldest = next((entry for entry in self._hash_of if not self._pins[entry]), None)
        if oldest is not None:
            self._remove(oldest)
        return oldest is not None

    def _remove(self, entry: int) -> None:
        del self._entry_of[self._hash_of.pop(entry)]
        self._free.append(entry)
