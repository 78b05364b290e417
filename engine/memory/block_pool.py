"""The pool of KV blocks as numbers: who holds how many references, what is cached, what is free.

Owns: reference counts, the content hash of each cached block, the order of eviction. A block is in one of three states:

    free    no reference, no known content          stack: the block freed last is warm, so it is handed out first
    cached  no reference, content known by hash     LRU: found by hash until its space is needed
    held    one reference or more                   may be known by hash too, and is then shared instead of copied

    total = free + cached + held

Every operation is O(1) per block. Must not know: tokens, requests, or what a block's bytes are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """``num_blocks`` blocks with ids ``0 .. num_blocks - 1``."""

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        # A linked list in eviction order with O(1) removal from the middle, which a prefix hit needs.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """All blocks of the pool."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks without reference and content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without reference whose content can still be found."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` could hand out: free and cached."""
        return len(self._free) + len(self._cached)

    def ref_count(self, block_id: int) -> int:
        """How many holders a block has."""
        return self._ref_counts[block_id]

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, held or cached."""
        return self._block_of.get(block_hash)

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out blocks with one reference each, evicting the least recently used cached ones when none is free.

        The caller has checked ``num_available``.
        """
        assert num_blocks <= self.num_available, f"{num_blocks} blocks asked, {self.num_available} available"
        for _ in range(num_blocks - len(self._free)):
            self._evict_oldest()
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Take one reference from each block of a sequence, given in the order of its positions.

        The last positions are cached first and so evicted first: a chain is of use only from its beginning.
        """
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} released more often than taken"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                if self._hash_of[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._cached[block_id] = None

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Make a held block's content findable. The first block with a content keeps the name."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is registered by nobody"
        if self._hash_of[block_id] is None and block_hash not in self._block_of:
            self._hash_of[block_id] = block_hash
            self._block_of[block_hash] = block_id

    def shrink_cache(self, num_kept: int) -> int:
        """Forget cached blocks, least recently used first, until ``num_kept`` are left. Returns how many were."""
        num_evicted = max(0, len(self._cached) - max(0, num_kept))
        for _ in range(num_evicted):
            self._evict_oldest()
        return num_evicted

    def check_invariants(self) -> None:
        """Raise AssertionError naming what does not add up."""
        num_held = sum(1 for count in self._ref_counts if count > 0)
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert not set(self._free) & set(self._cached), "a block is both free and cached"
        assert self.num_free + self.num_cached + num_held == self.num_blocks, "free + cached + held != total"
        for block_id in (*self._free, *self._cached):
            assert self._ref_counts[block_id] == 0, f"block {block_id} is available and referenced"
        for block_id in self._free:
            assert self._hash_of[block_id] is None, f"free block {block_id} has a content"
        for block_hash, block_id in self._block_of.items():
            assert self._hash_of[block_id] == block_hash, f"block {block_id} is found under a foreign hash"
        num_named = sum(1 for block_hash in self._hash_of if block_hash is not None)
        assert num_named == len(self._block_of), "a block has a hash and cannot be found by it"

    def _evict_oldest(self) -> None:
        block_id, _ = self._cached.popitem(last=False)
        block_hash = self._hash_of[block_id]
        assert block_hash is not None
        del self._block_of[block_hash]
        self._hash_of[block_id] = None
        self._free.append(block_id)
