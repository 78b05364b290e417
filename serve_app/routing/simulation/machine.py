"""One Mac as a fluid: prompts are read one at a time, decodes share what is left. Pure.

Owns: how long requests take on a machine with slots. Must not know: routing, or where requests come from.

While a prompt is read beside decodes, reading gets ``PREFILL_SHARE`` of the time. ``gains[k]`` is how many times faster
k decodes together are than one alone. Slots are given first come, first served.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from serve_app.protocol import PrefixChain
from serve_app.routing.prefix_memory import PrefixMemory
from serve_app.routing.report import ReplicaReport, reported_answers_s, tag_of

PREFILL_SHARE = 2 / 3
# Tokens: after days of virtual time a double of seconds is exact to a ten-thousandth of a token.
_DONE = 1e-3


@dataclass(frozen=True, slots=True)
class MachineKind:
    """A kind of Mac. ``gains[0]`` is unused; beyond the last, more rows gain nothing."""

    slots: int = 1
    prefill_tokens_per_s: float = 3000.0
    decode_tokens_per_s: float = 100.0
    gains: tuple[float, ...] = (0.0, 1.0)
    num_tokens_cached: int = 84_000
    usual_output_tokens: float = 700.0

    def gain(self, num_rows: int) -> float:
        """How much faster ``num_rows`` decodes are together."""
        return self.gains[min(num_rows, len(self.gains) - 1)]

    def step_s(self, num_rows: int) -> float:
        """Seconds in which each of ``num_rows`` decodes is a token further."""
        return num_rows / (self.decode_tokens_per_s * self.gain(num_rows))


@dataclass(slots=True)
class Job:
    """One request on its way. ``unread``: prompt tokens to compute, known when its reading starts."""

    request_id: str
    prefix: PrefixChain
    place: int
    num_output_tokens: float
    sent_s: float
    tag: int = 0
    read_from_s: float = math.nan
    first_token_s: float = math.nan
    finished_s: float = math.nan
    unread: float = 0.0
    num_cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.tag = tag_of(self.request_id)


@dataclass(slots=True)
class Machine:
    """A Mac at a moment. ``advance`` moves it on; nothing else does."""

    kind: MachineKind
    now_s: float = 0.0
    waiting: deque[Job] = field(default_factory=deque)
    to_read: deque[Job] = field(default_factory=deque)
    decoding: list[Job] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    num_served: int = 0
    request_seconds: float = 0.0
    num_reports: int = 0
    memory: PrefixMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = PrefixMemory(self.kind.num_tokens_cached)

    @property
    def num_in_slots(self) -> int:
        """Requests that hold a slot."""
        return len(self.to_read) + len(self.decoding)

    @property
    def num_requests(self) -> int:
        """Requests in slots and waiting."""
        return len(self.waiting) + self.num_in_slots

    def add(self, job: Job) -> None:
        """``job`` arrives now."""
        self.waiting.append(job)
        self.num_served += 1
        self._fill_slots()

    def next_event_s(self) -> float:
        """When something will next have changed; infinity when nothing runs."""
        read_rate, row_rate = self._rates()
        in_s = math.inf
        if self.to_read:
            in_s = self.to_read[0].unread / read_rate
        if self.decoding and row_rate > 0:
            in_s = min(in_s, min(self.left) / row_rate)
        return self.now_s + max(0.0, in_s)

    def advance(self, now_s: float) -> list[Job]:
        """Let the time up to ``now_s`` pass, at most to the next event; returns what has finished."""
        read_rate, row_rate = self._rates()
        passed_s = now_s - self.now_s
        self.request_seconds += passed_s * self.num_requests
        self.now_s = now_s
        if self.decoding:
            self.left = [left - row_rate * passed_s for left in self.left]
        if self.to_read:
            self.to_read[0].unread -= read_rate * passed_s
        finished = self._take_finished()
        if self.to_read and self.to_read[0].unread <= _DONE:
            self._end_reading()
        self._fill_slots()
        return finished

    def report(self) -> ReplicaReport:
        """What the Mac's replica would say of itself now."""
        kind = self.kind
        self.num_reports += 1
        answer_s, answer_row_s = reported_answers_s(
            kind.step_s, kind.usual_output_tokens, len(self.decoding), kind.slots
        )
        unread = sum(job.prefix.num_prompt_tokens - self.memory.num_cached_tokens(job.prefix) for job in self.waiting)
        jobs = (*self.waiting, *self.to_read, *self.decoding)
        return ReplicaReport(
            sequence=self.num_reports,
            slots=kind.slots,
            num_running=self.num_in_slots,
            num_waiting=len(self.waiting),
            num_unread_tokens=int(unread + sum(job.unread for job in self.to_read)),
            prefill_tokens_per_s=kind.prefill_tokens_per_s,
            answer_s=answer_s,
            answer_row_s=answer_row_s,
            answer_tokens=kind.usual_output_tokens,
            open_tags=frozenset(job.tag for job in jobs),
            prefixes=self.memory.newest(),
        )

    def _rates(self) -> tuple[float, float]:
        kind, num_rows = self.kind, len(self.decoding)
        read_rate = kind.prefill_tokens_per_s * (PREFILL_SHARE if num_rows else 1.0)
        if not num_rows:
            return read_rate, 0.0
        share = 1.0 - PREFILL_SHARE if self.to_read else 1.0
        return read_rate, share * kind.decode_tokens_per_s * kind.gain(num_rows) / num_rows

    def _take_finished(self) -> list[Job]:
        finished = [job for job, left in zip(self.decoding, self.left, strict=True) if left <= _DONE]
        if finished:
            kept = [(job, left) for job, left in zip(self.decoding, self.left, strict=True) if left > _DONE]
            self.decoding, self.left = [job for job, _ in kept], [left for _, left in kept]
            for job in finished:
                job.finished_s = self.now_s
        return finished

    def _end_reading(self) -> None:
        job = self.to_read.popleft()
        job.first_token_s = self.now_s
        self.memory.remember(job.prefix)
        self.decoding.append(job)
        self.left.append(job.num_output_tokens)
        self._start_reading()

    def _fill_slots(self) -> None:
        was_reading = bool(self.to_read)
        while self.waiting and self.num_in_slots < self.kind.slots:
            self.to_read.append(self.waiting.popleft())
        if not was_reading:
            self._start_reading()

    def _start_reading(self) -> None:
        if self.to_read:
            job = self.to_read[0]
            job.read_from_s = self.now_s
            job.num_cached_tokens = self.memory.num_cached_tokens(job.prefix)
            job.unread = float(job.prefix.num_prompt_tokens - job.num_cached_tokens)
