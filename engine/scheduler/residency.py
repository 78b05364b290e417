"""Requests that hold a slot: the slots themselves, the blocks behind them, and the way in and out.

Owns: which slot is whose, and that whatever a request held is given back exactly once. Must not know: who deserves a
slot, or why somebody leaves.
"""

from __future__ import annotations

import heapq
from collections import Counter

from engine.batch import BlockCopy
from engine.memory.kv_cache_manager import KvCacheManager, PrefixHit, num_blocks_for
from engine.memory.window_blocks import WindowBlocks, most_ahead_tokens
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.fairness import FairShares
from engine.scheduler.in_flight import InFlightSteps, LaunchedStep
from engine.scheduler.request_state import NO_SLOT, Place, Request
from engine.scheduler.shared_prefill import SharedPrefills
from engine.scheduler.state_snapshots import StateSnapshots
from engine.scheduler.waiting_room import WaitingRoom


class Residency:
    """Slots and blocks of running requests."""

    def __init__(
        self, config: SchedulerConfig, shares: FairShares, waiting: WaitingRoom, flight: InFlightSteps
    ) -> None:
        self.kv = KvCacheManager(config.num_blocks, config.block_size, config.prefix_cache != "off")
        caching = config.prefix_cache != "off"
        self.states: StateSnapshots | None = None
        if config.num_state_snapshots is not None:
            self.states = StateSnapshots(config.slots, config.num_state_snapshots, config.block_size, caching)
        self.windows: WindowBlocks | None = None
        if config.window is not None:
            ahead = most_ahead_tokens(
                config.max_chunk_tokens, config.slots * (1 + config.max_draft_tokens), config.max_steps_in_flight
            )
            self.windows = WindowBlocks(config.window, config.block_size, ahead, caching)
        self.prefills = SharedPrefills()
        self.peak_running = 0
        self._config = config
        self._shares = shares
        self._waiting = waiting
        self._flight = flight
        self._rows: list[Request | None] = [None] * config.slots
        self._free_slots = list(range(config.slots))
        self._released_ids: list[str] = []
        self._num_blocks_promised: int | None = None

    @property
    def num_running(self) -> int:
        """Slots in use."""
        return len(self._rows) - len(self._free_slots)

    @property
    def num_free_slots(self) -> int:
        """Slots nobody holds."""
        return len(self._free_slots)

    def running(self) -> list[Request]:
        """Requests with a slot, in slot order."""
        return [request for request in self._rows if request is not None]

    def horizon_tokens(self, request: Request) -> int:
        """Positions promised to a request: its tokens and as much of the coming answer as the watermark says.

        The last token of an answer is never computed, so an answer of n tokens needs n - 1 positions.
        """
        num_coming = min(request.max_tokens_total - request.num_tokens, self._config.admission_watermark_tokens)
        return max(request.num_tokens, request.num_tokens + num_coming - 1)

    def usable(self, request: Request, hit: PrefixHit) -> PrefixHit:
        """The part of a hit that all kinds of layers have: whole blocks only, unless all layers see everything."""
        if self.states is None and self.windows is None:
            return hit
        size = self._config.block_size
        num_whole, last = hit.num_tokens // size, -1
        request.states.num_matched_tokens = num_whole * size
        while num_whole != last:
            last = num_whole
            if self.windows is not None:
                num_whole = self.windows.longest(request.table.hashes, num_whole)
            if self.states is not None:
                num_whole = self.states.longest(request.table.hashes, num_whole)
        return PrefixHit(hit.block_ids[:num_whole], None, num_whole * size)

    @property
    def shares_partial_blocks(self) -> bool:
        """Whether a prefix may end inside a block, which is then copied: only where all layers see everything."""
        return self.states is None and self.windows is None

    @property
    def shares_prompts(self) -> bool:
        """Whether a fork can share its first's prompt: always, where all layers see everything."""
        if self.windows is not None and self._config.prefix_cache == "off":
            return False
        return self.states is None or self.states.shares

    def forget_promises(self) -> None:
        """Everybody's horizon has moved on since the last admission: what was promised is to be counted anew."""
        self._num_blocks_promised = None

    def fits(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a request's tokens fit now, and its promise beside all the others'."""
        if self.windows is not None and not self.windows.fits([other.window_table for other in self.running()]):
            return False
        if self._num_blocks_promised is None:
            self._num_blocks_promised = sum(self._promise(other) for other in self.running())
        size = self._config.block_size
        num_own = num_blocks_for(self.horizon_tokens(request), size) - num_blocks_for(request.num_tokens, size)
        num_taken = self.kv.num_blocks_taken(hit, request.num_tokens)
        return num_taken + num_own + self._num_blocks_promised <= self.kv.pool.num_available

    def enter(self, request: Request, hit: PrefixHit) -> None:
        """Give a request the lowest free slot, its prefix hit, and blocks for all of its known tokens."""
        request.slot = request.last_slot = heapq.heappop(self._free_slots)
        request.place = Place.SLOT
        self._rows[request.slot] = request
        request.copy_before_start = self.kv.attach(request.table, hit, request.num_tokens)
        if self.windows is not None:
            self.windows.attach(request.window_table, request.table.hashes, len(hit.block_ids))
        if self.states is not None:
            self.states.enter(request, hit)
        request.num_computed_tokens = request.num_confirmed_tokens = hit.num_tokens
        # What the cache had costs the user nothing, nor does what is computed again.
        request.num_charged_tokens = max(request.num_charged_tokens, min(hit.num_tokens, request.num_prompt_tokens))
        if self._num_blocks_promised is not None:
            self._num_blocks_promised += self._promise(request)
        self.prefills.start(request)
        self._shares[request.user].num_in_slots += 1
        self.peak_running = max(self.peak_running, self.num_running)

    def leave(self, request: Request, now_s: float) -> None:
        """Take slot and blocks from a request. Blocks that a launched step may write to stay out of the pool."""
        if self._num_blocks_promised is not None:
            self._num_blocks_promised -= self._promise(request)
        if self.states is not None:
            self.states.leave(request)
        dropped = self.prefills.stop(request)
        self._rows[request.slot] = None
        heapq.heappush(self._free_slots, request.slot)
        request.slot = NO_SLOT
        request.place = Place.GONE
        request.num_computed_tokens = request.num_confirmed_tokens = 0
        request.passing = False
        self._shares[request.user].num_in_slots -= 1
        self._return_blocks(request)
        request.wait.stop(self._waiting.clock, now_s)
        self._waiting.wake((*dropped, request), now_s)

    def has_room(self, request: Request) -> bool:
        """Whether the request's blocks reach to its newest token."""
        return len(request.table.block_ids) * self._config.block_size >= request.num_tokens

    def take_copy(self, request: Request) -> BlockCopy | None:
        """The copy that the request's first row needs, with the reference that keeps its source."""
        copy, request.copy_before_start = request.copy_before_start, None
        return copy

    def confirm(self, request: Request, num_confirmed: int) -> list[bytes]:
        """Positions of finished steps: their full blocks can be found now. Returns the hashes of the new ones."""
        hashes = self.kv.commit(request.table, request.token_ids, num_confirmed)
        if self.windows is not None:
            self.windows.confirm(request.window_table, request.table.hashes, num_confirmed)
        return hashes

    def settle(self, step: LaunchedStep) -> None:
        """A step is over: what waited for it goes back."""
        for ids in step.block_ids:
            self.kv.pool.release(ids)
        for ids in step.window_block_ids:
            assert self.windows is not None
            self.windows.pool.release(ids)
        self._released_ids += step.released_ids

    def take_released(self) -> tuple[str, ...]:
        """Requests that left since the last call and have no row in flight any more."""
        released, self._released_ids = tuple(self._released_ids), []
        return released

    def check_invariants(self) -> None:
        """Raise AssertionError naming what does not add up."""
        self.kv.pool.check_invariants()
        self.prefills.check_invariants()
        if self.states is not None:
            self.states.book.check_invariants()
        assert sorted(self._free_slots) == [i for i, r in enumerate(self._rows) if r is None], "free slots are wrong"
        for slot, request in enumerate(self._rows):
            if request is not None:
                assert (request.slot, request.place) == (slot, Place.SLOT), f"{request.request_id} lost its slot"
                self._check_progress(request)
        self._check_references()
        if self.windows is not None:
            self._check_window_references(self.windows)

    def _check_window_references(self, windows: WindowBlocks) -> None:
        windows.pool.check_invariants()
        references = Counter(self._flight.drained_window_blocks())
        for request in self.running():
            references.update(request.window_table.held)
        for block_id in range(windows.pool.num_blocks):
            counted, held = windows.pool.ref_count(block_id), references[block_id]
            assert counted == held, f"window block {block_id} counts {counted}, held {held}"

    def _check_progress(self, request: Request) -> None:
        name, block_ids = request.request_id, request.table.block_ids
        assert request.num_confirmed_tokens <= request.num_computed_tokens <= request.num_tokens, f"{name} is ahead"
        assert request.num_computed_tokens <= len(block_ids) * self._config.block_size, f"{name} outruns its blocks"
        assert len(set(block_ids)) == len(block_ids), f"{name} holds a block twice"

    def _check_references(self) -> None:
        """Every reference has a holder, and no block that a request will write to is in another's table."""
        references = Counter(self._flight.drained_blocks())
        tables: Counter[int] = Counter()
        for request in self.running():
            tables.update(request.table.block_ids)
            if request.copy_before_start is not None:
                references[request.copy_before_start.source] += 1
        references += tables
        for block_id in range(self.kv.pool.num_blocks):
            counted = self.kv.pool.ref_count(block_id)
            assert counted == references[block_id], f"block {block_id} counts {counted}, held {references[block_id]}"
        for request in self.running():
            for block_id in request.table.block_ids[request.num_confirmed_tokens // self._config.block_size :]:
                assert tables[block_id] == 1, f"{request.request_id} writes to block {block_id}, which is shared"

    def _promise(self, request: Request) -> int:
        """Blocks that a running request does not hold yet and was promised."""
        num_blocks = num_blocks_for(self.horizon_tokens(request), self._config.block_size)
        return max(0, num_blocks - len(request.table.block_ids))

    def _return_blocks(self, request: Request) -> None:
        block_ids = self.kv.detach(request.table)
        copy = self.take_copy(request)
        if copy is not None:
            self.kv.pool.release((copy.source,))
        window_block_ids = self.windows.detach(request.window_table) if self.windows is not None else []
        newest = self._flight.newest
        if request.num_rows_in_flight and newest is not None:
            newest.block_ids.append(block_ids)
            newest.window_block_ids += [window_block_ids] if window_block_ids else []
            newest.released_ids.append(request.request_id)
        else:
            self.kv.pool.release(block_ids)
            if self.windows is not None:
                self.windows.pool.release(window_block_ids)
            self._released_ids.append(request.request_id)
