"""Block tables of requests over one block pool: prefix hits, growth, copy-on-write, release.

Owns: which blocks hold which positions of a request, and which of them are committed to the prefix cache. Must not
know: slots, queues, steps, or why a request grows or leaves.

Only blocks whose every position has been computed by a finished step are committed. So nothing can be found by its
hash before its bytes exist, and a step that fails leaves nothing false behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.batch import BlockCopy
from engine.memory.block_hash import extend_hashes
from engine.memory.block_pool import BlockPool


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` positions."""
    return -(-num_tokens // block_size)


@dataclass(slots=True)
class BlockTable:
    """One request's blocks: ``block_ids[p // block_size]`` holds position p.

    ``hashes`` names the full blocks of the request's known tokens and outlives the blocks, so that a preempted request
    finds what is left of them. The first ``num_committed`` blocks are findable.
    """

    root: bytes
    hashes: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_committed: int = 0


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What a request need not compute: ``num_tokens`` positions.

    They lie in ``block_ids``, shared whole, and, when ``num_tokens`` ends inside a block, in ``partial_block``, which
    must be copied before the request writes to it.
    """

    block_ids: tuple[int, ...] = ()
    partial_block: int | None = None
    num_tokens: int = 0


NO_HIT = PrefixHit()


class KvCacheManager:
    """All block tables of one engine. ``caching`` False: blocks are never found by content."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._caching = caching

    def new_table(self, root: bytes, token_ids: Sequence[int]) -> BlockTable:
        """An empty table that knows the hashes of the full blocks of ``token_ids``."""
        table = BlockTable(root)
        if self._caching:
            extend_hashes(table.hashes, root, token_ids, len(token_ids), self.block_size)
        return table

    def find_prefix(self, table: BlockTable, num_tokens: int) -> PrefixHit:
        """The longest cached prefix of a request with ``num_tokens`` tokens, at most all but the last token.

        The last token is always computed: its logits choose the next one. Linear in the blocks found.
        """
        block_ids: list[int] = []
        for block_hash in table.hashes:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return self._cut_hit(block_ids, min(len(block_ids) * self.block_size, num_tokens - 1))

    def shared_prefix(self, source: BlockTable, num_tokens: int) -> PrefixHit:
        """The first ``num_tokens`` positions of another request's table, all computed already."""
        return self._cut_hit(source.block_ids, num_tokens)

    def without_copy(self, hit: PrefixHit) -> PrefixHit:
        """The part of a hit that needs no copy."""
        return PrefixHit(hit.block_ids, None, len(hit.block_ids) * self.block_size)

    def num_blocks_taken(self, hit: PrefixHit, num_tokens: int) -> int:
        """By how much attaching ``hit`` and room for ``num_tokens`` lowers the number of available blocks."""
        new = num_blocks_for(num_tokens, self.block_size) - len(hit.block_ids)
        sources = hit.block_ids if hit.partial_block is None else (*hit.block_ids, hit.partial_block)
        return new + sum(1 for block_id in sources if self.pool.ref_count(block_id) == 0)

    def attach(self, table: BlockTable, hit: PrefixHit, num_tokens: int) -> BlockCopy | None:
        """Fill an empty table with a hit and fresh blocks up to ``num_tokens`` positions.

        Returns the copy that must run before the request's first step. Its source holds one more reference, which the
        caller releases after that step.
        """
        assert not table.block_ids, "the table already holds blocks"
        self.pool.share(hit.block_ids)
        if hit.partial_block is not None:
            self.pool.share((hit.partial_block,))
        num_new = num_blocks_for(num_tokens, self.block_size) - len(hit.block_ids)
        table.block_ids = [*hit.block_ids, *self.pool.allocate(num_new)]
        table.num_committed = len(hit.block_ids) if self._caching else 0
        if hit.partial_block is None:
            return None
        return BlockCopy(hit.partial_block, table.block_ids[len(hit.block_ids)])

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` positions. False, and nothing changed, when the pool cannot."""
        num_new = num_blocks_for(num_tokens, self.block_size) - len(table.block_ids)
        if num_new <= 0:
            return True
        if num_new > self.pool.num_available:
            return False
        table.block_ids += self.pool.allocate(num_new)
        return True

    def commit(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> list[bytes]:
        """Make every block that ``num_computed`` positions fill findable. Returns the hashes of the new ones."""
        num_full = num_computed // self.block_size
        if not self._caching or num_full <= table.num_committed:
            return []
        extend_hashes(table.hashes, table.root, token_ids, num_computed, self.block_size)
        new = range(table.num_committed, num_full)
        for index in new:
            self.pool.register(table.block_ids[index], table.hashes[index])
        table.num_committed = num_full
        return [table.hashes[index] for index in new]

    def detach(self, table: BlockTable) -> list[int]:
        """Empty the table. The caller releases the returned blocks to the pool once no step can write to them."""
        block_ids, table.block_ids = table.block_ids, []
        table.num_committed = 0
        return block_ids

    def _cut_hit(self, block_ids: Sequence[int], num_tokens: int) -> PrefixHit:
        num_whole, num_rest = divmod(max(0, num_tokens), self.block_size)
        partial = block_ids[num_whole] if num_rest else None
        return PrefixHit(tuple(block_ids[:num_whole]), partial, max(0, num_tokens))
