"""One simulated machine: the engine's real scheduler, with predicted step times in place of a model.

Owns: turning scheduled steps into spans of virtual time, and jumping over steps that need no decision. Must not know:
where calls come from, or other machines.

Two shortcuts keep the cost low without another scheduler. While nobody reads a prompt, every step decodes the same
rows: the machine jumps to the first answer that ends, and an arrival stops the jump at the end of the step that would
then have been running. And steps that mix prompts with decoding may be taken ``steps_at_once`` at a time: the scheduler
gets budgets that many times as large, and decode rows move that many tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from engine.batch import BatchRow, SampledToken, StepBatch, StepOutput
from engine.request import EngineRequest, SamplingParams, Timeline, TokenOutput
from engine.scheduler.scheduler import Scheduler, SchedulerConfig
from engine.scheduler.step_cost import StepLoad, num_causal_pairs
from serve_app.capacity.perf_model import StepTimes, chunk_s, decode_rows_s

# Any token will do, and one ends an answer.
TOKEN, END = SampledToken(1), SampledToken(0)
UNLIMITED = 10**9
# Coarser than the engine's 16 tokens: fewer objects to move, and prompts are far longer than this. Where memory does
# not count, blocks do not either.
BLOCK_TOKENS = 64
UNCOUNTED_BLOCK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """What a machine can do. ``kv_tokens``: positions its KV pool holds; None leaves memory out of account.

    ``target_stall_s`` and ``max_chunk_tokens`` are the engine's ``prefill`` settings. ``longest_call_tokens``: of any
    call that will be sent, to size the pool when memory is left out.
    """

    name: str
    times: StepTimes
    slots: int
    longest_call_tokens: int
    kv_tokens: int | None = None
    target_stall_s: float = 0.5
    max_chunk_tokens: int = 512
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """One call as a machine sees it. Calls of one ``cache_key`` that begin with the same tokens share them;
    ``num_shared_tokens`` are common to all sessions of that key."""

    call_id: str
    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    received_s: float
    cache_key: str = ""
    num_shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A call that ended, with the scheduler's own marks."""

    call_id: str
    timeline: Timeline
    num_cached_tokens: int


@dataclass(slots=True)
class _Span:
    """A stretch of steps of ``step_s`` in the mean. ``num_steps`` shrinks when an arrival cuts it short."""

    batch: StepBatch
    started_s: float
    step_s: float
    num_steps: int
    reported_s: float
    only_decodes: bool

    @property
    def ends_s(self) -> float:
        return self.started_s + self.step_s * self.num_steps


@dataclass(slots=True)
class MachineUse:
    """What a machine's time went into, in seconds: any step, steps with prompts in them, and slots in use."""

    busy_s: float = 0.0
    prefill_s: float = 0.0
    row_s: float = 0.0


@dataclass
class SimulatedMachine:
    """Call ``add`` for arrivals, ``start`` when idle, ``finish`` at ``ends_s``."""

    spec: MachineSpec
    steps_at_once: int = 1
    use: MachineUse = field(default_factory=MachineUse)

    def __post_init__(self) -> None:
        self._scheduler = Scheduler(_scheduler_config(self.spec, self.steps_at_once))
        self._tokens_left: dict[str, int] = {}
        self._context: dict[str, int] = {}
        self._unread: dict[str, int] = {}
        self._span: _Span | None = None
        self.num_open = 0

    @property
    def ends_s(self) -> float | None:
        """When the present span ends; None when idle."""
        return None if self._span is None else self._span.ends_s

    @property
    def num_free_slots(self) -> int:
        """Slots that a call could have at once."""
        return max(0, self.spec.slots - self.num_open)

    @property
    def num_waiting(self) -> int:
        """Calls beyond the slots."""
        return max(0, self.num_open - self.spec.slots)

    @property
    def num_unread_tokens(self) -> int:
        """Prompt tokens of open calls that are still to be read."""
        return sum(self._unread.values())

    @property
    def is_reading(self) -> bool:
        """Whether a prompt is being read."""
        return self._span is not None and not self._span.only_decodes

    def add(self, call: SimulatedCall, now_s: float) -> None:
        """A call arrives. Raises the scheduler's refusals."""
        sampling = SamplingParams(max_tokens=call.num_output_tokens, temperature=0.0)
        request = EngineRequest(
            call.call_id, call.prompt_token_ids, sampling, call.received_s, cache_salt=call.cache_key
        )
        self._scheduler.add(request, now_s)
        self._tokens_left[call.call_id] = call.num_output_tokens
        self._context[call.call_id] = self._unread[call.call_id] = len(call.prompt_token_ids)
        self.num_open += 1
        span = self._span
        if span is not None and span.only_decodes:
            done = math.ceil((now_s - span.started_s) / span.step_s)
            span.num_steps = min(span.num_steps, max(1, done))

    def start(self, now_s: float) -> float | None:
        """Begin the next span and return when it ends; None when there is nothing to do."""
        batch = self._scheduler.schedule(now_s)
        if batch is None:
            return None
        decoding = [row for row in batch.rows if _decodes(row)]
        reading = [row for row in batch.rows if not _decodes(row)]
        context = sum(self._context[row.request_id] for row in decoding)
        load = StepLoad(len(decoding), context)
        self._span = self._read(batch, reading, load, now_s) if reading else self._jump(batch, decoding, load, now_s)
        return self._span.ends_s

    def finish(self, now_s: float) -> list[Finished]:
        """End the present span: every decode row has moved, prompts have been read."""
        span = self._span
        assert span is not None, "nothing was started"
        self._span = None
        tokens: dict[str, SampledToken] = {}
        for row in span.batch.rows:
            decodes = _decodes(row)
            if not decodes:
                self._unread[row.request_id] = max(0, row.num_prompt_tokens - row.start - row.num_tokens)
            if row.samples:
                tokens[row.request_id] = self._move(row.request_id, span.num_steps if decodes else 1)
        self._account(span)
        output = StepOutput(span.batch.step_index, tokens, span.reported_s)
        outputs = self._scheduler.update(span.batch, output, now_s)
        self._scheduler.take_released()
        return [self._leave(output) for output in outputs if output.finish_reason is not None]

    def _jump(self, batch: StepBatch, decoding: list[BatchRow], load: StepLoad, now_s: float) -> _Span:
        """Decode until the first answer ends. The step time is that of the mean context on the way."""
        num_steps = min(self._tokens_left[row.request_id] for row in decoding)
        grown = load.num_decode_context_tokens + len(decoding) * (num_steps - 1) // 2
        step_s = self.spec.times.step_s(replace(load, num_decode_context_tokens=grown))
        reported_s = self.steps_at_once * self.spec.times.step_s(load)
        return _Span(batch, now_s, step_s, num_steps, reported_s, only_decodes=True)

    def _read(self, batch: StepBatch, reading: list[BatchRow], decode: StepLoad, now_s: float) -> _Span:
        """Read chunks, in as many real steps as the real budget would have needed for them."""
        num_tokens = sum(row.num_tokens for row in reading)
        num_steps = math.ceil(num_tokens / self._real_chunk(decode.num_decode_rows))
        if decode.num_decode_rows:
            num_steps = min(num_steps, self.steps_at_once)
        num_pairs = sum(num_causal_pairs(row.start, row.num_tokens) for row in reading) // num_steps
        chunk = math.ceil(num_tokens / num_steps)
        last = num_tokens - chunk * (num_steps - 1)
        span_s = self.spec.times.step_s(replace(decode, num_chunk_tokens=last, num_chunk_pairs=num_pairs))
        if num_steps > 1:
            full = replace(decode, num_chunk_tokens=chunk, num_chunk_pairs=num_pairs)
            span_s += (num_steps - 1) * self.spec.times.step_s(full)
        # The scheduler learns what steps_at_once steps cost, also from a span of fewer.
        missing_s = max(0, self.steps_at_once - num_steps) * self.spec.times.step_s(decode)
        return _Span(batch, now_s, span_s / num_steps, num_steps, span_s + missing_s, only_decodes=False)

    def _real_chunk(self, num_rows: int) -> float:
        """Prompt tokens that one real step takes beside ``num_rows`` decode rows."""
        if num_rows == 0 or self.steps_at_once == 1:
            return self.spec.max_chunk_tokens
        return chunk_beside(self.spec, num_rows)

    def _move(self, call_id: str, num_tokens: int) -> SampledToken:
        moved = min(num_tokens, self._tokens_left[call_id])
        self._tokens_left[call_id] -= moved
        self._context[call_id] += moved
        return TOKEN if self._tokens_left[call_id] else END

    def _account(self, span: _Span) -> None:
        span_s = span.step_s * span.num_steps
        self.use.busy_s += span_s
        self.use.row_s += span_s * len(span.batch.rows)
        if not span.only_decodes:
            self.use.prefill_s += span_s

    def _leave(self, output: TokenOutput) -> Finished:
        assert output.timeline is not None
        del self._tokens_left[output.request_id], self._context[output.request_id], self._unread[output.request_id]
        self.num_open -= 1
        return Finished(output.request_id, output.timeline, output.num_cached_tokens)


def chunk_beside(spec: MachineSpec, num_rows: int) -> float:
    """Prompt tokens that fit into one step beside ``num_rows`` decode rows within the stall target."""
    decode_s = decode_rows_s(spec.times, num_rows)
    token_s = chunk_s(spec.times, spec.max_chunk_tokens) / spec.max_chunk_tokens
    return min(spec.max_chunk_tokens, max(16.0, (spec.target_stall_s - decode_s) / token_s))


def _decodes(row: BatchRow) -> bool:
    """A row that computes the newest token of an answer that has begun."""
    return row.num_tokens == 1 and row.samples and row.output_index > 0


def _scheduler_config(spec: MachineSpec, steps_at_once: int) -> SchedulerConfig:
    block_tokens = UNCOUNTED_BLOCK_TOKENS if spec.kv_tokens is None and not spec.prefix_cache else BLOCK_TOKENS
    kv_tokens = spec.kv_tokens or 2 * spec.slots * (spec.longest_call_tokens + block_tokens)
    # A machine of one slot reads a prompt beside nobody: in one piece or in many, it takes as long.
    max_chunk_tokens = spec.longest_call_tokens if spec.slots == 1 else spec.max_chunk_tokens * steps_at_once
    return SchedulerConfig(
        slots=spec.slots,
        num_blocks=max(2, kv_tokens // block_tokens),
        block_size=block_tokens,
        max_model_len=2 * spec.longest_call_tokens,
        eos_token_ids=(END.token_id,),
        max_waiting_requests=UNLIMITED,
        max_waiting_tokens=UNLIMITED,
        # A jump appends one token to a table where the engine appends hundreds, so answers are reserved whole.
        admission_watermark_tokens=UNLIMITED,
        target_stall_s=spec.target_stall_s * steps_at_once,
        max_chunk_tokens=max_chunk_tokens,
        prefix_cache="shared" if spec.prefix_cache else "off",
    )
