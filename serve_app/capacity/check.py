"""Prediction beside measurement for the very same sessions.

Owns: simulating a load that was sent, and the ratios. Must not know: files, sockets, or how the load was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.capacity.dispatch import Dispatch
from serve_app.capacity.machine import MachineSpec
from serve_app.capacity.planner import steps_at_once
from serve_app.capacity.profile import MachineProfile
from serve_app.capacity.simulator import Load, simulate
from serve_app.capacity.workload import plan_sessions
from serve_app.latency import RequestTiming, summarize

QUANTILES = ("p50", "p95")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of one load, in seconds."""

    figure: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1


def predict(
    load: Load, profile: MachineProfile, macs: int, slots: int, dispatch: Dispatch | None = None
) -> list[RequestTiming]:
    """Simulate ``load`` on ``macs`` machines of this profile; times include what a request takes besides its steps."""
    longest = 2 * _longest_tokens(load)
    spec = MachineSpec(
        name=profile.machine,
        times=profile.times,
        slots=slots,
        longest_call_tokens=longest,
        target_stall_s=profile.target_stall_s,
        max_chunk_tokens=profile.max_chunk_tokens,
    )
    simulation = simulate([spec] * macs, load, dispatch, steps_at_once(spec))
    return [_later(result.timing, profile.overhead_s) for result in simulation.results]


def _longest_tokens(load: Load) -> int:
    sessions = plan_sessions(load.workload, load.seed, load.num_sessions)
    return max(call.prompt_tokens + call.output_tokens for session in sessions for call in session.calls)


def _later(timing: RequestTiming, by_s: float) -> RequestTiming:
    return RequestTiming(
        sent_s=timing.sent_s,
        chunk_times_s=tuple(moment + by_s for moment in timing.chunk_times_s),
        num_prompt_tokens=timing.num_prompt_tokens,
        num_output_tokens=timing.num_output_tokens,
        queue_s=timing.queue_s,
    )


def compare(measured: Sequence[RequestTiming], predicted: Sequence[RequestTiming]) -> tuple[Comparison, ...]:
    """TTFT and end-to-end, p50 and p95. Both sets must hold at least one answer."""
    rows = []
    for name in ("ttft_s", "e2e_s"):
        left, right = (summarize(getattr(timing, name) for timing in each) for each in (measured, predicted))
        assert left is not None, "nothing was measured"
        assert right is not None, "nothing was predicted"
        for quantile in QUANTILES:
            figure = f"{name.removesuffix('_s')} {quantile}"
            rows.append(Comparison(figure, getattr(left, quantile), getattr(right, quantile)))
    return tuple(rows)
