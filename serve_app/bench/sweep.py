"""Finds the highest rate of sessions that an endpoint serves within a service level.

Owns: the search (`Search`, which is told results and says what to try next) and its run. Must not know: how a load is
sent or shown.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from serve_app.bench.plan import Level
from serve_app.bench.results import LoadResult
from serve_app.latency import ServiceLevel

Measure = Callable[[Level], Awaitable[LoadResult]]


@dataclass(frozen=True, slots=True)
class RateTried:
    """One rate: the share of its requests that met the service level, failures counting as not met."""

    rate_per_s: float
    attainment: float
    met: bool


@dataclass(frozen=True, slots=True)
class SweepResult:
    """``highest_rate_per_s`` None: even the lowest rate tried was too much. ``bounded``: a higher rate failed, so the
    search did not merely stop for want of time or at its upper end."""

    highest_rate_per_s: float | None
    bounded: bool
    tried: tuple[RateTried, ...]


@dataclass(slots=True)
class Search:
    """Doubles from ``start_per_s`` until a rate fails, then halves the gap until it is below ``resolution`` of itself.

    A rate meets its level when the share ``attainment`` of its requests does. Whether it does falls with the rate, up
    to noise: one unlucky failure makes the answer too low, never too high. No rate below a sixteenth of the start is
    tried.
    """

    start_per_s: float
    max_per_s: float
    resolution: float = 0.1
    attainment: float = 0.95
    tried: list[RateTried] = field(default_factory=list)

    def rates(self) -> Iterator[float]:
        """The next rate to try; the result must be told to ``tell`` before the next one is asked for."""
        while (rate := self._next()) is not None:
            yield rate

    def tell(self, rate: RateTried) -> None:
        """Take in a result."""
        self.tried.append(rate)

    def result(self) -> SweepResult:
        """What is known so far."""
        low, high = self._bracket()
        return SweepResult(low or None, high is not None, tuple(self.tried))

    def _bracket(self) -> tuple[float, float | None]:
        failed = [each.rate_per_s for each in self.tried if not each.met]
        high = min(failed) if failed else None
        met = [each.rate_per_s for each in self.tried if each.met and (high is None or each.rate_per_s < high)]
        return max(met, default=0.0), high

    def _next(self) -> float | None:
        low, high = self._bracket()
        if not self.tried:
            return self.start_per_s
        if high is None:
            return min(low * 2, self.max_per_s) if low < self.max_per_s else None
        if high - low <= self.resolution * high or (low == 0 and high < self.start_per_s / 16):
            return None
        return (low + high) / 2


async def sweep(measure: Measure, search: Search, level: ServiceLevel, max_total_s: float) -> SweepResult:
    """Run the search until it ends or ``max_total_s`` is over."""
    deadline_s = time.monotonic() + max_total_s
    for rate_per_s in search.rates():
        if time.monotonic() >= deadline_s:
            break
        share = attained(await measure(Level(rate_per_s=rate_per_s)), level)
        search.tell(RateTried(rate_per_s, share, share >= search.attainment))
    return search.result()


def attained(result: LoadResult, level: ServiceLevel) -> float:
    """Share of all requests that met ``level``; one that failed did not."""
    timings = [call.timing for call in result.calls if call.timing is not None]
    return sum(map(level.met_by, timings)) / max(1, result.summary.num_requests)


def sweep_table(result: SweepResult, level: ServiceLevel) -> str:
    """Markdown: the rates in the order in which they were tried, and the answer in words."""
    rows: Sequence[str] = [
        f"| {each.rate_per_s:.3g} | {each.attainment:.1%} | {'met' if each.met else 'missed'} |"
        for each in result.tried
    ]
    bounds = ", ".join(
        f"{name} {value * 1000:g} ms"
        for name, value in (
            ("queue", level.queue_s),
            ("TTFT", level.ttft_s),
            ("TPOT", level.tpot_s),
            ("E2E", level.e2e_s),
        )
        if value is not None
    )
    if result.highest_rate_per_s is None:
        answer = f"No rate tried meets {bounds}."
    else:
        answer = f"Highest rate that meets {bounds}: {result.highest_rate_per_s:.3g} sessions per second"
        answer += "." if result.bounded else " or more (nothing higher was tried)."
    return "\n".join(["| sessions/s | requests within bounds | |", "|---|---|---|", *rows, "", answer])
