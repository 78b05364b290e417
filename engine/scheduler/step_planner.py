"""What the next step computes.

Owns: the order inside a step: room for those who decode, by preemption if need be; then admission; then prompt chunks
from what is left of the step's budget. Must not know: how results come back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from engine.batch import BatchRow, BlockCopy, StateLoad, StateSave, StepBatch
from engine.request import WaitReason
from engine.scheduler.admission import Admission
from engine.scheduler.in_flight import InFlightSteps, LaunchedStep
from engine.scheduler.preemption import choose_for_blocks
from engine.scheduler.prefill_turn import PrefillTurn
from engine.scheduler.prompt_lookup import Guess
from engine.scheduler.request_state import Place, Request
from engine.scheduler.residency import Residency
from engine.scheduler.speculation import Speculator
from engine.scheduler.state_snapshots import StateSnapshots
from engine.scheduler.step_cost import StepCostModel, StepLoad, num_causal_pairs
from engine.scheduler.waiting_room import WaitingRoom

Chunk = tuple[Request, int]


class StepPlanner:
    """Builds steps. ``preempt`` takes a request off its slot."""

    def __init__(
        self,
        waiting: WaitingRoom,
        residency: Residency,
        flight: InFlightSteps,
        admission: Admission,
        turn: PrefillTurn,
        cost: StepCostModel,
        preempt: Callable[[Request, float], None],
        speculator: Speculator | None = None,
    ) -> None:
        self._waiting = waiting
        self._residency = residency
        self._flight = flight
        self._admission = admission
        self._turn = turn
        self._cost = cost
        self._preempt = preempt
        self._speculator = speculator

    def plan(self, step_index: int, now_s: float) -> LaunchedStep | None:
        """The next step, or None when there is nothing to compute now."""
        if self._waits_for_results():
            return None
        decoding, somebody_left = self._grow_decoding(now_s)
        if somebody_left:
            # Whoever was taken off would be the first to come back for the blocks that were just made free.
            self._waiting.clock.set_reason(WaitReason.BLOCKS, now_s)
        else:
            self._admission.admit(now_s)
            # Admission may have taken a slot from somebody who was going to decode.
            decoding = [r for r in decoding if r.place is Place.SLOT and r.num_uncomputed_tokens == 1]
        chunks, load = self._plan_chunks(decoding, now_s)
        planned = [*((request, 1) for request in decoding), *chunks]
        if not planned:
            return None
        drafts = self._drafts(decoding, chunks, load)
        copies: list[BlockCopy] = []
        rows = tuple(
            [
                self._take_row(request, num_tokens, drafts.get(request.arrival, ()), copies, now_s)
                for request, num_tokens in planned
            ]
        )
        requests = tuple([request for request, _ in planned])
        batch = StepBatch(step_index, rows, tuple(copies))
        step = LaunchedStep(batch, requests, load)
        step.block_ids += [[copy.source] for copy in copies]
        step.num_draft_tokens, step.scheduled_s = sum(map(len, drafts.values())), now_s
        if self._residency.states is not None:
            _plan_states(self._residency.states, step)
        return step

    def _waits_for_results(self) -> bool:
        """Whether this step is better chosen when the tokens in flight are known, to carry guesses on top of them."""
        if self._speculator is None or not len(self._flight) or len(self._waiting):
            return False
        return self._speculator.wants_results(self._residency.running())

    def _drafts(self, decoding: Sequence[Request], chunks: Sequence[Chunk], load: StepLoad) -> dict[int, Guess]:
        """Guesses that the rows carry, by arrival, with blocks for them. None beside prompts, which fill the step."""
        if self._speculator is None or chunks or any(request.num_pending_tokens for request in decoding):
            return {}
        drafts: dict[int, Guess] = {}
        for request, guess in zip(decoding, self._speculator.choose(decoding, load), strict=True):
            if guess and self._residency.kv.grow(request.table, request.num_tokens + len(guess)):
                drafts[request.arrival] = guess
        return drafts

    def _grow_decoding(self, now_s: float) -> tuple[list[Request], bool]:
        """Requests that compute their newest token in this step, with a block for it; and whether anybody had to go."""
        num_running = self._residency.num_running
        decoding: list[Request] = []
        for request in self._residency.running():
            if request.place is not Place.SLOT or request.num_uncomputed_tokens != 1 or _is_ahead(request):
                continue
            if self._make_room(request, now_s):
                decoding.append(request)
            elif request.place is Place.SLOT:
                request.wait.start(WaitReason.BLOCKS, self._waiting.clock, now_s)
        still_here = [request for request in decoding if request.place is Place.SLOT]
        return still_here, self._residency.num_running < num_running

    def _make_room(self, request: Request, now_s: float) -> bool:
        """Room for the newest token, by preemption if need be. False when this step has to go without."""
        while not self._residency.kv.grow(request.table, request.num_tokens):
            running = self._residency.running()
            if self._flight.num_blocks_draining or any(r.ends_with_pending for r in running):
                return False
            victim = choose_for_blocks(running)
            assert victim is not None
            self._preempt(victim, now_s)
            if victim is request:
                return False
        return True

    def _plan_chunks(self, decoding: Sequence[Request], now_s: float) -> tuple[list[Chunk], StepLoad]:
        """Prompt chunks for this step, and the whole step's load."""
        context = sum([request.num_tokens for request in decoding])
        load = StepLoad(len(decoding), context)
        unread = self._unread(decoding)
        if not unread:
            return [], load
        chunks = self._turn.share_out(self._turn.order(unread), self._cost.chunk_budget(load))
        given = {request.arrival for request, _ in chunks}
        for request in unread:
            if request.arrival not in given:
                request.wait.start(WaitReason.PREFILL_TURN, self._waiting.clock, now_s)
        num_tokens = sum(number for _, number in chunks)
        num_pairs = sum(num_causal_pairs(request.num_computed_tokens, number) for request, number in chunks)
        return chunks, StepLoad(len(decoding), context, num_tokens, num_pairs)

    def _unread(self, decoding: Sequence[Request]) -> list[Request]:
        """Requests with tokens to compute that do not decode in this step, and room for them."""
        if len(decoding) == self._residency.num_running:
            return []
        taken = {request.arrival for request in decoding}
        return [
            request
            for request in self._residency.running()
            if request.arrival not in taken and request.num_uncomputed_tokens > 0
            if not _is_ahead(request) and self._residency.has_room(request)
        ]

    def _take_row(
        self, request: Request, num_tokens: int, drafts: Guess, copies: list[BlockCopy], now_s: float
    ) -> BatchRow:
        """The request's row in the step that is going out."""
        request.wait.stop(self._waiting.clock, now_s)
        request.row_taken(now_s)
        copy = self._residency.take_copy(request)
        if copy is not None:
            copies.append(copy)
        start = request.num_computed_tokens
        if self._residency.windows is not None:
            self._residency.windows.grow(request.window_table, start + num_tokens + len(drafts))
        num_known = request.num_tokens
        samples = start + num_tokens == num_known
        row = BatchRow(
            request_id=request.asked.request_id,
            slot=request.slot,
            start=start,
            num_tokens=num_tokens + len(drafts),
            token_ids=request.token_ids,
            block_ids=request.table.block_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.asked.sampling,
            seed=request.seed,
            samples=samples,
            output_index=num_known - request.num_prompt_tokens,
            embeds=request.asked.embeds,
            draft_token_ids=drafts,
            window_block_ids=request.window_table.block_ids,
        )
        request.has_drafts_in_flight = bool(drafts)
        request.num_computed_tokens = start + num_tokens
        if samples:
            request.num_pending_tokens += 1
        return row


def _plan_states(states: StateSnapshots, step: LaunchedStep) -> None:
    """The recurrent states that the step's rows start from, and those that are saved on the way."""
    loads: list[StateLoad] = []
    saves: list[StateSave] = []
    for request in step.requests:
        loads += states.loads(request)
    for row, request in zip(step.batch.rows, step.requests, strict=True):
        saved = step.saved[request.arrival] = states.saves(request, row)
        saves += [StateSave(row.slot, each.entry, each.num_tokens) for each in saved]
    step.batch = dataclasses.replace(step.batch, state_loads=tuple(loads), state_saves=tuple(saves))


def _is_ahead(request: Request) -> bool:
    """Whether the request has to wait for a token in flight: it is the last, or the host would be too far behind."""
    num_allowed = 0 if request.asked.sampling.guided or request.has_drafts_in_flight else 1
    return request.num_pending_tokens > num_allowed or request.ends_with_pending
