"""The last hour of one replica, minute by minute. Pure: time comes in as an argument.

Owns: counts and latency distributions per minute, and percentiles over any number of them. Must not know: who looks.
Distributions are counts in buckets whose bounds grow by a tenth, so a percentile is within five percent of the exact
one, and those of many replicas can be added.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from serve_app.telemetry.record import CANCELLED, OK, CallRecord
from serve_app.telemetry.recorder import Tokens

NUM_MINUTES = 60
RATE_S = 5
_GROWTH = math.log(1.1)
_LEAST_S = 1e-5
_MINUTE_S = 60.0
Buckets = dict[int, int]


@dataclass(slots=True)
class Minute:
    """What happened in one minute. ``number``: minutes since 1970."""

    number: int
    num_calls: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    ttft: Buckets = field(default_factory=dict)
    gap: Buckets = field(default_factory=dict)
    queue: Buckets = field(default_factory=dict)


class LastHour:
    """The minutes of the last hour in which anything happened."""

    def __init__(self) -> None:
        self._minutes: deque[Minute] = deque()
        self._seconds: deque[tuple[int, int]] = deque()

    def tokens(self, tokens: Tokens, now_s: float) -> None:
        """Count new tokens at Unix time ``now_s``."""
        minute = self._at(now_s)
        minute.num_output_tokens += tokens.num_output
        self._count_second(int(now_s), tokens.num_output)
        for gap_s in tokens.gaps_s:
            count(minute.gap, gap_s)
        for num_prompt, num_cached in tokens.first_of:
            minute.num_prompt_tokens += num_prompt
            minute.num_cached_tokens += num_cached

    def finished(self, record: CallRecord, now_s: float) -> None:
        """Count a call that is over."""
        minute = self._at(now_s)
        minute.num_calls += 1
        minute.num_failed += record.outcome not in (OK, CANCELLED)
        minute.num_cancelled += record.outcome == CANCELLED
        minute.num_preemptions += record.num_preemptions
        for answer in record.answers:
            if answer.ttft_s is not None:
                count(minute.ttft, answer.ttft_s)
            if answer.queue_s is not None:
                count(minute.queue, answer.queue_s)

    def tokens_per_s(self, now_s: float) -> float:
        """Output tokens a second over the last ``RATE_S`` whole seconds."""
        second = int(now_s)
        return sum(num for at, num in self._seconds if second - RATE_S <= at < second) / RATE_S

    def minutes(self, now_s: float) -> tuple[Minute, ...]:
        """The minutes that are still within the hour, oldest first; the present one is the last, if there is one."""
        self._forget(int(now_s // _MINUTE_S))
        return tuple(self._minutes)

    def _at(self, now_s: float) -> Minute:
        number = int(now_s // _MINUTE_S)
        if not self._minutes or self._minutes[-1].number < number:
            self._minutes.append(Minute(number))
            self._forget(number)
        return self._minutes[-1]

    def _count_second(self, second: int, num_tokens: int) -> None:
        if self._seconds and self._seconds[-1][0] == second:
            num_tokens += self._seconds.pop()[1]
        self._seconds.append((second, num_tokens))
        while self._seconds[0][0] < second - RATE_S:
            self._seconds.popleft()

    def _forget(self, number: int) -> None:
        while self._minutes and self._minutes[0].number <= number - NUM_MINUTES:
            self._minutes.popleft()


def count(buckets: Buckets, value_s: float) -> None:
    """Add one value."""
    number = math.floor(math.log(max(value_s, _LEAST_S)) / _GROWTH)
    buckets[number] = buckets.get(number, 0) + 1


def added(distributions: Iterable[Mapping[int, int]]) -> Buckets:
    """Several distributions as one."""
    total: Buckets = {}
    for buckets in distributions:
        for number, num in buckets.items():
            total[number] = total.get(number, 0) + num
    return total


def percentile_s(buckets: Mapping[int, int], q: float) -> float | None:
    """The value at percentile ``q`` (0..100), the middle of its bucket; None when there are no values."""
    rank = q / 100 * sum(buckets.values())
    for number in sorted(buckets):
        rank -= buckets[number]
        if rank <= 1e-9:
            return math.exp((number + 0.5) * _GROWTH)
    return None
