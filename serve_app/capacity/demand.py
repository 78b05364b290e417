"""What is asked of a fleet and how well it must be answered, in the terms of the person who buys it.

Owns: the busiest hour as a rate of sessions, service levels over many calls, and whether a set of answers keeps them.
Must not know: machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from serve_app.capacity.workload import PlannedSession, Workload, plan_sessions
from serve_app.latency import RequestTiming, Summary, summarize

_NUM_SAMPLED = 1000


@dataclass(frozen=True, slots=True)
class Demand:
    """``calls_per_hour`` of ``workload`` in the busiest hour, times ``peak_factor`` for the peak inside it."""

    workload: Workload
    calls_per_hour: float
    peak_factor: float = 1.0

    @property
    def calls_per_s(self) -> float:
        """Calls at the peak."""
        return self.calls_per_hour * self.peak_factor / 3600

    def sampled(self) -> tuple[PlannedSession, ...]:
        """Sessions to take means from, the same every time."""
        return plan_sessions(self.workload, "sample", _NUM_SAMPLED)

    def more_often(self, factor: float) -> Demand:
        """The same people asking ``factor`` times as often."""
        return replace(self, calls_per_hour=self.calls_per_hour * factor)

    def with_longer_prompts(self, factor: float) -> Demand:
        """The same calls with prompts ``factor`` times as long."""
        sessions = tuple(
            each.model_copy(
                update={
                    "prompt_tokens": each.prompt_tokens.scaled(factor),
                    "new_tokens": each.new_tokens.scaled(factor),
                }
            )
            for each in self.workload.sessions
        )
        return replace(self, workload=self.workload.model_copy(update={"sessions": sessions}))


@dataclass(frozen=True, slots=True)
class FleetLevel:
    """Bounds over all calls, in seconds and tokens per second; None is no bound.

    ``wait_*``: arrival until the prompt is begun. ``tokens_per_s_p5``: all but the slowest 5% of answers flow faster.
    """

    wait_mean_s: float | None = None
    wait_p95_s: float | None = None
    ttft_p95_s: float | None = None
    e2e_p95_s: float | None = None
    tokens_per_s_p5: float | None = None


@dataclass(frozen=True, slots=True)
class Answers:
    """What callers saw. Each is None when nobody was answered."""

    wait_s: Summary | None
    ttft_s: Summary | None
    e2e_s: Summary | None
    tpot_s: Summary | None

    def missed(self, level: FleetLevel) -> Mapping[str, tuple[float, float]]:
        """Bounds that are not kept: name -> (bound, value)."""
        return {name: pair for name, pair in self._pairs(level) if pair[1] > pair[0]}

    def _pairs(self, level: FleetLevel) -> Iterator[tuple[str, tuple[float, float]]]:
        wait, ttft, e2e, tpot = self.wait_s, self.ttft_s, self.e2e_s, self.tpot_s
        if level.wait_mean_s is not None and wait is not None:
            yield "mean wait", (level.wait_mean_s, wait.mean)
        if level.wait_p95_s is not None and wait is not None:
            yield "p95 wait", (level.wait_p95_s, wait.p95)
        if level.ttft_p95_s is not None and ttft is not None:
            yield "p95 time to first token", (level.ttft_p95_s, ttft.p95)
        if level.e2e_p95_s is not None and e2e is not None:
            yield "p95 end to end", (level.e2e_p95_s, e2e.p95)
        if level.tokens_per_s_p5 is not None and tpot is not None:
            yield "p95 time per token", (1 / level.tokens_per_s_p5, tpot.p95)


def summarize_answers(timings: Sequence[RequestTiming]) -> Answers:
    """What the callers of ``timings`` saw, by the same definitions as the bench."""
    return Answers(
        wait_s=summarize(t.queue_s for t in timings if t.queue_s is not None),
        ttft_s=summarize(t.ttft_s for t in timings),
        e2e_s=summarize(t.e2e_s for t in timings),
        tpot_s=summarize(tpot for t in timings if (tpot := t.tpot_s) is not None),
    )
