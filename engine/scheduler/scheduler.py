"""One engine's scheduler: requests in, steps out, tokens back.

Owns: requests from their arrival to their end, and what a result does to them. Must not know: clocks, threads, devices,
text. Time comes in as ``now_s``; equal calls give equal answers.

A walk of one request:

    add       refused, or placed in the waiting room
    schedule  gets a slot, and blocks minus what the prefix cache has; its prompt goes out in chunks, then a row a step
    update    what a finished step computed becomes findable; its token is appended, judged and given out
    ...       preempted: slot and blocks go, tokens and place in line stay, and ``schedule`` starts over from there
    update    the last token carries finish reason and timeline; slot and blocks go
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from engine.batch import BatchRow, SampledToken, StepBatch, StepOutput
from engine.errors import (
    AdmissionRefusedError,
    DeadlineExceededError,
    EngineError,
    InvalidParameterError,
    StepFailedError,
)
from engine.interfaces import RunningView, SchedulerStats, WaitingView
from engine.memory.block_hash import root_hash
from engine.request import EngineRequest, FinishReason, Pause, TokenOutput, WaitReason
from engine.scheduler.admission import Admission, check_request
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.counters import Counters
from engine.scheduler.fairness import FairShares
from engine.scheduler.forecast import (
    num_unread_tokens,
    predicted_wait_s,
    prefill_tokens_per_s,
    usual_answer_row_s,
    usual_answer_s,
)
from engine.scheduler.in_flight import InFlightSteps, LaunchedStep
from engine.scheduler.preemption import IMMUNE_TOKENS, choose_for_blocks
from engine.scheduler.prefill_turn import PrefillTurn
from engine.scheduler.request_state import Place, Request, seed_of
from engine.scheduler.residency import Residency
from engine.scheduler.speculation import Speculator
from engine.scheduler.state_snapshots import SavedState
from engine.scheduler.step_cost import StepCostModel
from engine.scheduler.step_planner import StepPlanner
from engine.scheduler.stopping import finish_reason
from engine.scheduler.views import views
from engine.scheduler.waiting_room import WaitingRoom

__all__ = ["Scheduler", "SchedulerConfig"]

_UNKNOWN_WAIT_S = 1.0


class Scheduler:
    """The only writer of ``Request``. Used from one thread."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._eos_token_ids = frozenset(config.eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._shares = FairShares()
        self._waiting = WaitingRoom(self._shares)
        self._flight = InFlightSteps()
        self._residency = Residency(config, self._shares, self._waiting, self._flight)
        self._admission = Admission(config, self._shares, self._waiting, self._residency, self._requests, self._preempt)
        self._cost = StepCostModel(config.target_stall_s, config.max_chunk_tokens)
        self._speculator = (
            Speculator(config.max_draft_tokens, config.slots, self._cost) if config.max_draft_tokens else None
        )
        self._planner = StepPlanner(
            self._waiting,
            self._residency,
            self._flight,
            self._admission,
            PrefillTurn(self._shares, config.max_chunk_tokens),
            self._cost,
            self._preempt,
            self._speculator,
        )
        self._counters = Counters()
        self._num_arrivals = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def add(self, asked: EngineRequest, now_s: float) -> None:
        """Take a request in.

        Raises RequestError for one that can never be answered, AdmissionRefusedError when the queue is full.
        """
        max_tokens_total = check_request(asked, self._config)
        if asked.request_id in self._requests or asked.request_id in self._flight.draining_ids():
            raise InvalidParameterError(f"The request id {asked.request_id!r} is in use.", "request_id")
        refusal = self._admission.refusal(len(asked.prompt_token_ids))
        if refusal is not None:
            self._counters.num_refused += 1
            raise AdmissionRefusedError(*refusal, retry_after_s=self._predicted_wait_s() or _UNKNOWN_WAIT_S)
        self._num_arrivals += 1
        table = self._residency.kv.new_table(self._root_of(asked), asked.prompt_token_ids)
        request = Request(asked, self._num_arrivals, table, max_tokens_total, seed_of(asked))
        self._requests[asked.request_id] = request
        if asked.deadline_s is not None:
            heapq.heappush(self._deadlines, (asked.deadline_s, request.arrival, asked.request_id))
        self._shares.enter(request.user)
        request.wait.add(WaitReason.PREFILL_TURN, now_s - asked.received_s)
        self._waiting.enter(request, now_s)

    def cancel(self, request_id: str, now_s: float) -> TokenOutput | None:
        """End a request that nobody waits for any more. Returns its account; None if it is not here."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._counters.num_cancelled += 1
        return self._end(request, FinishReason.CANCELLED, now_s)

    def complete(self, request_id: str, now_s: float) -> TokenOutput | None:
        """End a request whose text is complete, a stop string having come. As ``cancel``, but it counts as finished."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._counters.finished(request)
        return self._end(request, FinishReason.STOP, now_s)

    def expire(self, now_s: float) -> list[TokenOutput]:
        """End every request whose deadline has passed."""
        outputs: list[TokenOutput] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.arrival == arrival:
                age_s = now_s - request.asked.received_s
                error = DeadlineExceededError(f"The request was not done at its deadline; it was {age_s:.1f} s old.")
                outputs.append(self._fail(request, error, now_s))
        return outputs

    def fail_all(self, error: EngineError, now_s: float) -> list[TokenOutput]:
        """End every request with ``error``."""
        return [self._fail(request, error, now_s) for request in list(self._requests.values())]

    def take_released(self) -> tuple[str, ...]:
        """Ids that finished or were preempted and have no row in flight: tell the runner before the next launch."""
        return self._residency.take_released()

    def schedule(self, now_s: float) -> StepBatch | None:
        """The next step, or None when there is nothing to compute now."""
        assert len(self._flight) < self._config.max_steps_in_flight, "too many steps in flight"
        step = self._planner.plan(self._counters.num_steps, now_s)
        if step is None:
            return None
        self._flight.launch(step)
        self._counters.num_steps += 1
        return step.batch

    def update(self, batch: StepBatch, output: StepOutput, now_s: float) -> list[TokenOutput]:
        """Take a step's result in. Results for requests that left meanwhile are dropped."""
        step = self._land(batch)
        self._observe(step, output.elapsed_s, now_s)
        outputs: list[TokenOutput] = []
        for row, request in zip(batch.rows, step.requests, strict=True):
            saved = step.saved.get(request.arrival, ())
            if request.place is Place.GONE:
                self._settle_states(saved, still_runs=False)
                continue
            error = output.failures.get(row.request_id)
            token = output.tokens.get(row.request_id) if row.samples else None
            if error is None and row.samples and token is None:
                error = StepFailedError("The step returned no token for this request.")
            if error is not None:
                self._settle_states(saved, still_runs=False)
                outputs.append(self._fail(request, error, now_s))
                continue
            self._confirm(request, row.start, row.start + row.num_tokens - len(row.draft_token_ids), now_s)
            self._settle_states(saved, still_runs=request.place is Place.SLOT)
            if token is not None:
                outputs.append(self._append(request, token, now_s))
                outputs += self._append_further(request, row, output.further_tokens.get(row.request_id, ()), now_s)
        return outputs

    def fail_batch(self, batch: StepBatch, error: EngineError, now_s: float) -> list[TokenOutput]:
        """A step raised: its requests end with ``error``, the others go on."""
        step = self._land(batch)
        for saved in step.saved.values():
            self._settle_states(saved, still_runs=False)
        return [self._fail(r, error, now_s) for r in step.requests if r.place is not Place.GONE]

    def hold_admissions(self, held: bool) -> None:
        """While held, nobody gets a slot, and the waiting wait for headroom."""
        self._admission.is_held = held

    def shrink_prefix_cache(self, num_blocks_kept: int) -> int:
        """Forget cached blocks beyond ``num_blocks_kept``. Returns how many were forgotten."""
        if self._residency.windows is not None:
            self._residency.windows.pool.shrink_cache(num_blocks_kept)
        return self._residency.kv.pool.shrink_cache(num_blocks_kept)

    def preempt_one(self, now_s: float) -> bool:
        """Take one request off its slot, but never the last."""
        victim = choose_for_blocks(self._residency.running()) if self._residency.num_running > 1 else None
        if victim is not None:
            self._preempt(victim, now_s)
        return victim is not None

    def stats(self, now_s: float) -> SchedulerStats:
        """The moment's numbers and the totals since the start."""
        pool, windows = self._residency.kv.pool, self._residency.windows
        return SchedulerStats(
            slots=self._config.slots,
            num_running=self._residency.num_running,
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
            peak_running=self._residency.peak_running,
            num_blocks_total=pool.num_blocks,
            num_blocks_free=pool.num_free,
            num_blocks_cached=pool.num_cached,
            num_window_blocks_free=windows.pool.num_free if windows is not None else 0,
            num_window_blocks_cached=windows.pool.num_cached if windows is not None else 0,
            num_unread_tokens=num_unread_tokens(self._residency, self._waiting),
            predicted_wait_s=self._predicted_wait_s(),
            prefill_tokens_per_s=prefill_tokens_per_s(self._config, self._cost),
            usual_answer_s=usual_answer_s(self._residency, self._cost, self._counters),
            usual_answer_row_s=usual_answer_row_s(self._cost, self._counters),
            usual_answer_tokens=self._counters.usual_output_tokens,
            waiting_on=self._waiting.count_by_reason(),
            num_admissions=self._admission.num_admissions,
            num_admission_waves=self._admission.num_waves,
            **self._counters.as_stats(),
        )

    def views(self, now_s: float) -> tuple[tuple[RunningView, ...], tuple[WaitingView, ...]]:
        """Who holds which slot, and who waits for what; of the waiting the first few."""
        return views(self._residency, self._waiting, now_s)

    def check_invariants(self) -> None:
        """Raise AssertionError naming what does not add up."""
        self._residency.check_invariants()
        self._waiting.check_invariants()
        running = {request.request_id for request in self._residency.running()}
        waiting = {request.request_id for request in self._waiting.requests()}
        assert not running & waiting, "a request runs and waits"
        assert running | waiting == set(self._requests), "a request is nowhere"
        assert self._residency.num_running <= self._config.slots, "more requests run than there are slots"
        self._shares.check_invariants(self._requests.values())

    def _root_of(self, asked: EngineRequest) -> bytes:
        user = asked.user if self._config.prefix_cache == "per-user" else ""
        return root_hash(self._config.revision, asked.cache_salt, user)

    def _predicted_wait_s(self) -> float | None:
        return predicted_wait_s(self._config, self._residency, self._waiting, self._cost, self._counters)

    def _land(self, batch: StepBatch) -> LaunchedStep:
        step = self._flight.land(batch.step_index)
        for row, request in zip(batch.rows, step.requests, strict=True):
            if row.samples:
                request.num_pending_tokens -= 1
                request.has_drafts_in_flight = False
        self._residency.settle(step)
        return step

    def _settle_states(self, saved: Sequence[SavedState], still_runs: bool) -> None:
        for each in saved:
            assert self._residency.states is not None
            self._residency.states.landed(each, still_runs)

    def _observe(self, step: LaunchedStep, elapsed_s: float, now_s: float) -> None:
        """A step's time teaches what such steps cost."""
        if step.num_draft_tokens and self._speculator is not None:
            # Nothing computed while it was prepared: it cost all the time since it was chosen.
            self._speculator.observe(step.load, step.num_draft_tokens, now_s - step.scheduled_s)
            self._counters.num_draft_tokens += step.num_draft_tokens
        else:
            self._cost.observe(step.load, elapsed_s)

    def _confirm(self, request: Request, start: int, end: int, now_s: float) -> None:
        """Positions of a finished step: charge them, and let others find the blocks that they filled."""
        num_new = min(end, request.num_prompt_tokens) - request.num_charged_tokens
        if num_new > 0:
            self._shares.charge(request.user, num_new, 0)
            request.num_charged_tokens += num_new
        if request.place is not Place.SLOT:
            return
        request.num_confirmed_tokens = end
        hashes = self._residency.confirm(request, end)
        if hashes:
            self._residency.prefills.committed(hashes)
            self._waiting.wake(hashes, now_s)
        if start < request.num_prompt_tokens - 1 <= end:
            self._waiting.wake((request,), now_s)

    def _append_further(
        self, request: Request, row: BatchRow, tokens: Sequence[SampledToken], now_s: float
    ) -> list[TokenOutput]:
        """Tokens after guesses that came true: each guess was computed as the position before its successor."""
        outputs: list[TokenOutput] = []
        first = row.start + row.num_tokens - len(row.draft_token_ids)
        for position, token in enumerate(tokens, first):
            if request.place is Place.GONE:
                break
            self._counters.num_accepted_tokens += 1
            if request.place is Place.SLOT:
                request.num_computed_tokens = position + 1
                self._confirm(request, position, position + 1, now_s)
            outputs.append(self._append(request, token, now_s))
        return outputs

    def _append(self, request: Request, sampled: SampledToken, now_s: float) -> TokenOutput:
        """A token of the answer. It may belong to a request that was preempted while its row was in flight."""
        request.token_ids.append(sampled.token_id)
        if request.place is not Place.SLOT:
            self._waiting.token_arrived()
        is_first = request.first_token_s is None
        if is_first:
            request.first_token_s = now_s
            self._counters.first_token(request)
        self._counters.num_output_tokens += 1
        self._shares.charge(request.user, 0, 1)
        if self._speculator is not None:
            self._speculator.appended(request, self._residency.num_running)
        logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        reason = finish_reason(request, self._eos_token_ids)
        if reason is not None:
            self._counters.finished(request)
            self._remove(request, now_s)
        return TokenOutput(
            request_id=request.asked.request_id,
            token_ids=(sampled.token_id,),
            logprobs=logprobs,
            finish_reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            timeline=request.timeline(None if reason is None else now_s) if is_first or reason else None,
            embedding=sampled.embedding,
        )

    def _fail(self, request: Request, error: EngineError, now_s: float) -> TokenOutput:
        self._counters.num_failed += 1
        return self._end(request, FinishReason.ERROR, now_s, error)

    def _end(
        self, request: Request, reason: FinishReason, now_s: float, error: EngineError | None = None
    ) -> TokenOutput:
        """Take a request out, without another token. Returns its account."""
        self._remove(request, now_s)
        return TokenOutput(
            request_id=request.request_id,
            finish_reason=reason,
            error=error,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            timeline=request.timeline(now_s),
        )

    def _remove(self, request: Request, now_s: float) -> None:
        """Give back everything that a request holds. It is gone for good."""
        if request.place is Place.SLOT:
            self._residency.leave(request, now_s)
        else:
            self._waiting.leave(request, now_s)
            self._waiting.wake((request,), now_s)
        del self._requests[request.request_id]
        self._shares.leave(request.user)

    def _preempt(self, request: Request, now_s: float) -> None:
        """Free slot and blocks; tokens and place in line stay."""
        self._residency.leave(request, now_s)
        request.pauses.append(Pause(now_s))
        request.immune_until_output = request.num_output_tokens + IMMUNE_TOKENS
        self._counters.num_preemptions += 1
        self._waiting.enter(request, now_s)
