"""Blocks of sliding-window layers, in a pool of their own: those behind the window go back while the request runs.

Owns: tables with holes, which prefixes are of use, and that running requests never lack a block. Must not know: slots,
steps, the layers.

A token sees ``window_tokens`` positions, itself included. So a prefix is of use when the blocks in sight of its end are
there, whatever became of the ones before; and what a request holds does not grow with its length: the blocks in sight,
and those of positions that are computed but not yet confirmed. Blocks that it gives back can be found by their content
until their space is needed, like those of the other layers, and under the same hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.memory.block_pool import BlockPool

MIN_CHUNK_TOKENS = 16
"""No chunk budget is smaller."""
HOLE = -1
"""Stands in a table for a block that was given back."""


@dataclass(frozen=True, slots=True)
class WindowConfig:
    """``num_blocks`` blocks for layers that see ``window_tokens`` positions."""

    window_tokens: int
    num_blocks: int


@dataclass(slots=True)
class WindowTable:
    """``block_ids[p // block_size]`` holds position p, or is a hole; the first ``num_freed`` are."""

    block_ids: list[int] = field(default_factory=list)
    num_freed: int = 0
    num_committed: int = 0

    @property
    def held(self) -> list[int]:
        """Blocks that are not holes, in the order of their positions."""
        return self.block_ids[self.num_freed :]


def num_blocks_needed(window_tokens: int, block_size: int, slots: int, num_tokens_ahead: int) -> int:
    """Blocks with which ``slots`` requests never lack one. ``num_tokens_ahead``: computed, unconfirmed, in all."""
    return slots * _blocks_per_request(window_tokens, block_size) + _blocks_ahead(num_tokens_ahead, block_size)


def most_ahead_tokens(max_chunk_tokens: int, num_decode_tokens: int, max_steps_in_flight: int) -> int:
    """Positions in steps that are not over. Each step has ``num_decode_tokens`` in rows that decode, guesses included,
    and chunks."""
    return max_steps_in_flight * (max(max_chunk_tokens, MIN_CHUNK_TOKENS) + num_decode_tokens)


def _blocks_per_request(window_tokens: int, block_size: int) -> int:
    """The most blocks of confirmed positions that a request holds: what its next token sees, which may begin and end
    inside a block, and one more that a row's positions may reach into."""
    return -(-(window_tokens - 1) // block_size) + 2


def _blocks_ahead(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


class WindowBlocks:
    """All window tables of one engine. ``num_tokens_ahead``: the most positions that are computed and not yet
    confirmed, of all requests together."""

    def __init__(self, config: WindowConfig, block_size: int, num_tokens_ahead: int, caching: bool) -> None:
        self.pool = BlockPool(config.num_blocks)
        self.window_tokens = config.window_tokens
        self._block_size = block_size
        self._caching = caching
        self._blocks_per_request = _blocks_per_request(config.window_tokens, block_size)
        self._blocks_ahead = _blocks_ahead(num_tokens_ahead, block_size)

    def longest(self, hashes: Sequence[bytes], num_whole: int) -> int:
        """The most of the first ``num_whole`` blocks after which everything in sight is cached here."""
        best = num_found_in_row = 0
        for index in range(num_whole):
            num_found_in_row = num_found_in_row + 1 if self.pool.find(hashes[index]) is not None else 0
            if num_found_in_row >= index + 1 - self._first_seen(index + 1):
                best = index + 1
        return best

    def fits(self, running: Sequence[WindowTable]) -> bool:
        """Whether one more request can run so that all can hold what they will ever see.

        Only blocks that still drain from requests that left can stand in the way: the pool is large enough for all
        slots.
        """
        held = {block_id for table in running for block_id in table.held}
        num_draining = self.pool.num_blocks - self.pool.num_available - len(held)
        needed = (len(running) + 1) * self._blocks_per_request + self._blocks_ahead
        return needed <= self.pool.num_blocks - num_draining

    def attach(self, table: WindowTable, hashes: Sequence[bytes], num_hit_blocks: int) -> None:
        """Fill an empty table with what is in sight of a hit's end."""
        assert not table.block_ids, "the table already holds blocks"
        shared = self._found(hashes, num_hit_blocks)
        self.pool.share(shared)
        table.num_freed = num_hit_blocks - len(shared)
        table.block_ids = [HOLE] * table.num_freed + shared
        table.num_committed = num_hit_blocks

    def grow(self, table: WindowTable, num_tokens: int) -> None:
        """Room for ``num_tokens`` positions: there always is, or ``fits`` would have kept somebody out."""
        num_new = -(-num_tokens // self._block_size) - len(table.block_ids)
        if num_new > 0:
            table.block_ids += self.pool.allocate(num_new)

    def confirm(self, table: WindowTable, hashes: Sequence[bytes], num_confirmed: int) -> None:
        """``num_confirmed`` positions are in finished steps: their full blocks can be found, and those that no later
        token sees go back. Rows in flight are later than these positions, so they read none of those either."""
        num_full = num_confirmed // self._block_size
        if self._caching:
            for index in range(max(table.num_committed, table.num_freed), num_full):
                self.pool.register(table.block_ids[index], hashes[index])
            table.num_committed = max(table.num_committed, num_full)
        num_behind = max(0, num_confirmed + 1 - self.window_tokens) // self._block_size
        for index in range(table.num_freed, num_behind):
            self.pool.release((table.block_ids[index],))
            table.block_ids[index] = HOLE
        table.num_freed = max(table.num_freed, num_behind)

    def detach(self, table: WindowTable) -> list[int]:
        """Empty the table. The caller releases the returned blocks to the pool once no step can write to them."""
        held = table.held
        table.block_ids, table.num_freed, table.num_committed = [], 0, 0
        return held

    def _first_seen(self, num_blocks: int) -> int:
        """The first block in sight of the token that follows ``num_blocks`` whole blocks."""
        return max(0, num_blocks * self._block_size + 1 - self.window_tokens) // self._block_size

    def _found(self, hashes: Sequence[bytes], num_hit_blocks: int) -> list[int]:
        found = [self.pool.find(hashes[index]) for index in range(self._first_seen(num_hit_blocks), num_hit_blocks)]
        assert None not in found, "a hit reaches further than the blocks that are there"
        return [block_id for block_id in found if block_id is not None]
