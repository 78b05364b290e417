"""Prompts that are being computed right now, so that an equal beginning is not computed twice.

Owns: which running request is going to commit which block hash. Must not know: who waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.scheduler.request_state import Request

# Waiting costs a step or more; computing a few blocks beside the other request costs less.
_MIN_BLOCKS_WORTH_WAITING = 4


class SharedPrefills:
    """Block hashes in the making, by the request that makes them."""

    def __init__(self) -> None:
        self._maker_of: dict[bytes, Request] = {}

    def start(self, request: Request) -> None:
        """A request with fresh blocks is going to compute the rest of its known full blocks."""
        for block_hash in request.table.hashes[request.table.num_committed :]:
            self._maker_of.setdefault(block_hash, request)

    def committed(self, hashes: Iterable[bytes]) -> None:
        """These blocks can be found in the pool now."""
        for block_hash in hashes:
            self._maker_of.pop(block_hash, None)

    def stop(self, request: Request) -> list[bytes]:
        """A request leaves its slot. Returns the hashes that it will not commit."""
        dropped = [
            block_hash
            for block_hash in request.table.hashes[request.table.num_committed :]
            if self._maker_of.get(block_hash) is request
        ]
        for block_hash in dropped:
            del self._maker_of[block_hash]
        return dropped

    def worth_waiting_for(self, request: Request, num_blocks_found: int) -> bytes | None:
        """The last block hash that others are computing of this request's prompt, straight after those found.

        None when too little would be saved, or when its maker is less urgent than the request itself.
        """
        last = None
        num_shared = 0
        hashes = request.table.hashes
        for block_hash in hashes[num_blocks_found:]:
            maker = self._maker_of.get(block_hash)
            if maker is None or maker.priority > request.priority:
                break
            last = block_hash
            num_shared += 1
        enough = min(_MIN_BLOCKS_WORTH_WAITING, len(hashes) - num_blocks_found)
        return last if num_shared >= max(1, enough) else None

    def check_invariants(self) -> None:
        """Raise AssertionError naming what does not add up."""
        for block_hash, maker in self._maker_of.items():
            assert maker.slot >= 0, f"{maker.request_id} computes a shared block without a slot"
            pending = maker.table.hashes[maker.table.num_committed :]
            assert block_hash in pending, f"{maker.request_id} has committed a block that is still waited for"
