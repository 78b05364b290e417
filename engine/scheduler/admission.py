"""Who may wait, and who of the waiting gets a slot.

Owns: refusal at the door, and the step from the waiting room to a slot. Must not know: steps or results.

A request is admitted when a slot is free and its tokens, the promised part of its answer, and the promises to all who
run fit in the pool together. The head of the queue is admitted first. When it lacks blocks, a much shorter request may
go before it, as often as ``prefill_turn`` allows; then nobody does, and what the running requests give back is kept
for the head until it fits. A head that runs alone always fits: requests that do not are refused at the door.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.errors import ContextLengthError, InvalidParameterError, NeverFitsError
from engine.memory.kv_cache_manager import PrefixHit, num_blocks_for
from engine.request import EngineRequest, WaitReason
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.fairness import FairShares
from engine.scheduler.preemption import choose_for_slot
from engine.scheduler.prefill_turn import count_pass, may_pass
from engine.scheduler.request_state import Place, Request
from engine.scheduler.residency import Residency
from engine.scheduler.waiting_room import ParkingKey, WaitingRoom

_NUM_LOOKED_AHEAD = 16


def check_request(asked: EngineRequest, config: SchedulerConfig) -> int:
    """Refuse what can never be answered. Returns the length at which prompt and answer end at the latest.

    Raises InvalidParameterError, ContextLengthError or NeverFitsError.
    """
    num_prompt = len(asked.prompt_token_ids)
    if num_prompt == 0:
        raise InvalidParameterError("The prompt is empty.", "prompt")
    if asked.sampling.max_tokens < 1:
        raise InvalidParameterError(f"max_tokens is {asked.sampling.max_tokens}, at least 1 is needed.", "max_tokens")
    if num_prompt >= config.max_model_len:
        raise ContextLengthError(num_prompt, config.max_model_len)
    max_tokens_total = min(num_prompt + asked.sampling.max_tokens, config.max_model_len)
    num_needed = num_blocks_for(max_tokens_total - 1, config.block_size)
    if num_needed > config.num_blocks:
        raise NeverFitsError(num_needed, config.num_blocks)
    return max_tokens_total


class Admission:
    """``requests`` are all requests of the scheduler by id; ``preempt`` takes one off its slot.

    ``num_admissions`` counts slots given, ``num_waves`` the steps in which any was.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        shares: FairShares,
        waiting: WaitingRoom,
        residency: Residency,
        requests: Mapping[str, Request],
        preempt: Callable[[Request, float], None],
    ) -> None:
        self.is_held = False
        self.num_admissions = 0
        self.num_waves = 0
        self._config = config
        self._shares = shares
        self._waiting = waiting
        self._residency = residency
        self._requests = requests
        self._preempt = preempt

    def refusal(self, num_prompt_tokens: int) -> tuple[str, int, int] | None:
        """What is full, its limit and the number given, if one more cannot wait. Who finds a slot does not wait."""
        num_free_slots = 0 if self.is_held else self._residency.num_free_slots
        num_waiting = len(self._waiting) + 1
        if num_waiting <= num_free_slots:
            return None
        limit = self._config.max_waiting_requests + num_free_slots
        if num_waiting > limit:
            return "requests", limit, num_waiting
        num_tokens = self._waiting.num_tokens + num_prompt_tokens
        if num_tokens > self._config.max_waiting_tokens:
            return "tokens", self._config.max_waiting_tokens, num_tokens
        return None

    def admit(self, now_s: float) -> None:
        """Give slots to the waiting, and note what the head of the queue waits for."""
        self._residency.forget_promises()
        num_before = self.num_admissions
        while (reason := self._admit_next(now_s)) is None:
            pass
        self._waiting.clock.set_reason(reason, now_s)
        self.num_waves += self.num_admissions > num_before

    def _admit_next(self, now_s: float) -> WaitReason | None:
        """Admit or park one request; None if that was done, else what stands in the way."""
        head = self._waiting.queue.head()
        if head is None:
            return WaitReason.PREFILL_TURN
        if self.is_held:
            return WaitReason.HEADROOM
        victim = None
        if not self._residency.num_free_slots:
            victim = choose_for_slot(head, self._residency.running(), self._shares, self._config.slots)
            if victim is None:
                return WaitReason.SLOTS
        hit = self._longest_hit(head)
        if self._park_if_shared(head, hit, now_s):
            return None
        if victim is not None:
            if self._fitting(head, hit) is None:
                return WaitReason.SLOTS
            self._preempt(victim, now_s)
        if self._enter_if_fits(head, hit, now_s) or self._let_pass(head, now_s):
            return None
        return WaitReason.BLOCKS

    def _let_pass(self, head: Request, now_s: float) -> bool:
        for request in self._waiting.queue.first(_NUM_LOOKED_AHEAD)[1:]:
            if not may_pass(request, head, self._shares, self._config.max_chunk_tokens):
                continue
            hit = self._longest_hit(request)
            if self._park_if_shared(request, hit, now_s):
                continue
            if self._enter_if_fits(request, hit, now_s):
                count_pass(request, head)
                return True
        return False

    def _enter_if_fits(self, request: Request, hit: PrefixHit, now_s: float) -> bool:
        fitting = self._fitting(request, hit)
        if fitting is None:
            return False
        self._waiting.leave(request, now_s)
        self._shares.selected(request.user)
        self._residency.enter(request, fitting)
        self.num_admissions += 1
        request.wait.start(WaitReason.PREFILL_TURN, self._waiting.clock, now_s)
        if request.admitted_s is None:
            request.admitted_s = now_s
            request.num_cached_tokens = fitting.num_tokens
        return True

    def _fitting(self, request: Request, hit: PrefixHit) -> PrefixHit | None:
        """As much of the hit as fits with the rest of the request, or None. A row still in flight keeps it out."""
        if request.num_rows_in_flight:
            return None
        if self._residency.fits(request, hit):
            return hit
        # In a nearly full pool the block that is copied may be the very one that the copy needs.
        without_copy = self._residency.kv.without_copy(hit)
        return without_copy if self._residency.fits(request, without_copy) else None

    def _longest_hit(self, request: Request) -> PrefixHit:
        kv = self._residency.kv
        hit = self._residency.usable(request, kv.find_prefix(request.table, request.num_tokens))
        parent = self._fork_parent(request) if self._residency.shares_partial_blocks else None
        if parent is None or parent.place is not Place.SLOT:
            return hit
        num_shared = min(request.num_prompt_tokens - 1, parent.num_confirmed_tokens)
        return kv.shared_prefix(parent.table, num_shared) if num_shared > hit.num_tokens else hit

    def _park_if_shared(self, request: Request, hit: PrefixHit, now_s: float) -> bool:
        key = self._parking_key(request, hit)
        if key is not None:
            self._waiting.park(request, key, now_s)
        return key is not None

    def _parking_key(self, request: Request, hit: PrefixHit) -> ParkingKey | None:
        """What the request had better wait for instead of computing it a second time."""
        parent = self._fork_parent(request)
        if parent is not None and not request.num_output_tokens:
            is_running = parent.place is Place.SLOT
            if is_running and parent.num_confirmed_tokens < request.num_prompt_tokens - 1:
                return parent
            if not is_running and not parent.num_output_tokens:
                return parent
        num_found = num_blocks_for(hit.num_tokens, self._config.block_size)
        return self._residency.prefills.worth_waiting_for(request, num_found)

    def _fork_parent(self, request: Request) -> Request | None:
        """The living request whose prompt this one shares by the caller's word, if it is true.

        One of another user or urgency does not count: it could be taken off its slot for this request's sake, and with
        it would go the blocks that were to be shared.
        """
        if not self._residency.shares_prompts:
            return None
        parent = self._requests.get(request.asked.fork_of or "")
        if parent is None or parent.arrival >= request.arrival:
            return None
        is_kin = (parent.user, parent.priority, parent.table.root) == (
            request.user,
            request.priority,
            request.table.root,
        )
        return parent if is_kin and parent.asked.prompt_token_ids == request.asked.prompt_token_ids else None
