"""What TTFT, ITL, TPOT, E2E, throughput and goodput mean here: one definition for bench, metrics and planner.

Owns: percentiles, the timing of one request, service levels, and the summary of a load. Must not know: where the times
come from (a client's clock, the engine's marks, or the simulator's virtual clock) or how a summary is shown.

All times are seconds on one monotonic clock. The definitions follow vLLM's serving benchmark, with one difference: a
chunk counts only when it carries text, so a first chunk that holds nothing but the role is not a first token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
TOKEN_GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
E2E_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


def percentile(ordered: Sequence[float], q: float) -> float:
    """Value at percentile ``q`` (0..100) of an ascending, non-empty sequence, linear between neighbours.

    The same rule as numpy's default ("linear", Hyndman and Fan's type 7).
    """
    position = (len(ordered) - 1) * q / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Summary:
    """A set of measurements in the unit of its inputs."""

    num: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def summarize(values: Iterable[float]) -> Summary | None:
    """Summarise ``values``; None when there are none, because zero would read as a measurement."""
    ordered = sorted(values)
    if not ordered:
        return None
    quantiles = {f"p{q}": percentile(ordered, q) for q in (50, 90, 95, 99)}
    mean = math.fsum(ordered) / len(ordered)
    return Summary(num=len(ordered), mean=mean, min=ordered[0], max=ordered[-1], **quantiles)


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """One answered request.

    ``sent_s``: the request was written. ``chunk_times_s``: arrival of each chunk with text, ascending, at least one.
    ``num_output_tokens``: tokens of the answer as the server counts them. ``queue_s``: how long the request waited for
    its prefill to start, where that is known.
    """

    sent_s: float
    chunk_times_s: tuple[float, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    queue_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token: request written to first text."""
        return self.chunk_times_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """End to end: request written to last text."""
        return self.chunk_times_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (last - first text) / (tokens - 1); None for one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Inter-token latencies as a reader of the stream feels them: every gap between successive chunks."""
        return tuple(b - a for a, b in pairwise(self.chunk_times_s))


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Upper bounds on one request, in seconds; None is no bound. A request meets it when it meets every bound."""

    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def met_by(self, request: RequestTiming) -> bool:
        """Whether ``request`` keeps every bound. An unknown value breaks its bound; one token has a TPOT of 0."""
        tpot_s = request.tpot_s if request.num_output_tokens > 1 else 0.0
        pairs = (
            (self.queue_s, request.queue_s),
            (self.ttft_s, request.ttft_s),
            (self.tpot_s, tpot_s),
            (self.e2e_s, request.e2e_s),
        )
        return all(bound is None or (value is not None and value <= bound) for bound, value in pairs)

    @property
    def is_open(self) -> bool:
        """Whether there is no bound at all."""
        return all(getattr(self, field.name) is None for field in fields(self))


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """A load: rates over ``duration_s`` and latencies of the answered requests only.

    ``itl_s`` pools every gap of every request, so one stall of a stream shows; ``tpot_s`` has one value a request, so
    it does not. ``goodput_per_s`` counts requests that met the service level; None when none was asked for.
    """

    num_requests: int
    num_failed: int
    duration_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_per_s: float | None
    queue_s: Summary | None
    ttft_s: Summary | None
    itl_s: Summary | None
    tpot_s: Summary | None
    e2e_s: Summary | None


def summarize_load(
    answered: Sequence[RequestTiming], num_failed: int, duration_s: float, level: ServiceLevel | None = None
) -> LoadSummary:
    """Summarise a load that took ``duration_s`` > 0. Failed requests count, but lend no latency and no token."""
    num_prompt_tokens = sum(request.num_prompt_tokens for request in answered)
    num_output_tokens = sum(request.num_output_tokens for request in answered)
    goodput_per_s = None
    if level is not None and not level.is_open:
        goodput_per_s = sum(map(level.met_by, answered)) / duration_s
    return LoadSummary(
        num_requests=len(answered) + num_failed,
        num_failed=num_failed,
        duration_s=duration_s,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        requests_per_s=len(answered) / duration_s,
        output_tokens_per_s=num_output_tokens / duration_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / duration_s,
        goodput_per_s=goodput_per_s,
        queue_s=summarize(r.queue_s for r in answered if r.queue_s is not None),
        ttft_s=summarize(r.ttft_s for r in answered),
        itl_s=summarize(gap for r in answered for gap in r.gaps_s),
        tpot_s=summarize(tpot for r in answered if (tpot := r.tpot_s) is not None),
        e2e_s=summarize(r.e2e_s for r in answered),
    )
