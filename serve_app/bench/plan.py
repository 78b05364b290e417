"""What a bench run will do, before it does it.

Owns: the levels, how many sessions each sends, the seeds, and the arithmetic that `--dry-run` shows. Must not know: how
a load is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from serve_app.bench.errors import BenchError
from serve_app.capacity.workload import PlannedSession, Workload, plan_sessions
from serve_app.latency import ServiceLevel

MAX_SESSIONS = 100_000
# With fewer a closed loop's quantiles are single requests.
MIN_SESSIONS = 6


@dataclass(frozen=True, slots=True)
class Level:
    """One load: either so many clients at once, or sessions that arrive at random at a rate."""

    num_clients: int | None = None
    rate_per_s: float | None = None

    def __str__(self) -> str:
        if self.num_clients is None:
            return f"{self.rate_per_s:g}/s"
        return f"{self.num_clients} client{'s' if self.num_clients > 1 else ''}"


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """A ladder of levels, each run ``num_repeats`` times.

    ``sessions_per_client`` sizes a closed loop (with a floor for few clients), ``num_sessions`` an open one, which gets
    more of them when they would arrive in less than ``min_load_s``.
    ``max_level_s`` cuts one load off, ``max_total_s`` stops the ladder between two loads. ``idle_sample_s``: how long
    to look, before a load, whether the machine is idle.
    """

    workload: Workload
    levels: tuple[Level, ...]
    seed: str = "7"
    num_repeats: int = 1
    sessions_per_client: int = 4
    num_sessions: int = 64
    min_load_s: float = 0.0
    num_warmups: int = 1
    num_answers_checked: int = 2
    max_level_s: float = 600.0
    max_total_s: float = 3600.0
    idle_sample_s: float = 0.5
    service_level: ServiceLevel = field(default_factory=ServiceLevel)

    def __post_init__(self) -> None:
        if not self.levels:
            raise BenchError("There is no level to run.", "give --concurrency or --rate")
        largest = max(self.sessions_of(level) for level in self.levels)
        if largest > MAX_SESSIONS:
            raise BenchError(f"A level has {largest} sessions; at most {MAX_SESSIONS} are allowed.", "ask for fewer")

    def sessions_of(self, level: Level) -> int:
        """How many sessions a level sends."""
        if level.num_clients is not None:
            return max(MIN_SESSIONS, level.num_clients * self.sessions_per_client)
        return max(self.num_sessions, math.ceil((level.rate_per_s or 0.0) * self.min_load_s))

    def seed_of(self, level: Level, repeat: int) -> str:
        """A seed of its own for every load: prompts that no cache has seen, and the same for every endpoint."""
        return f"{self.seed}/{repeat}/{level}"

    def loads(self) -> Iterator[tuple[int, Level]]:
        """Every load in order: all levels once, then again."""
        for repeat in range(self.num_repeats):
            for level in self.levels:
                yield repeat, level

    def sessions(self, level: Level, repeat: int) -> tuple[PlannedSession, ...]:
        """The sessions of one load."""
        return plan_sessions(self.workload, self.seed_of(level, repeat), self.sessions_of(level))


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """How much one load asks for."""

    level: str
    repeat: int
    num_sessions: int
    num_calls: int
    num_prompt_tokens: int
    num_output_tokens: int
    longest_call_tokens: int


def forecast(plan: BenchPlan) -> tuple[LoadForecast, ...]:
    """What each load will send, counted from the very sessions that will be sent."""
    return tuple(_forecast_load(plan, level, repeat) for repeat, level in plan.loads())


def _forecast_load(plan: BenchPlan, level: Level, repeat: int) -> LoadForecast:
    sessions = plan.sessions(level, repeat)
    calls = [call for session in sessions for call in session.calls]
    return LoadForecast(
        level=str(level),
        repeat=repeat,
        num_sessions=len(sessions),
        num_calls=len(calls),
        num_prompt_tokens=sum(call.prompt_tokens for call in calls),
        num_output_tokens=sum(call.output_tokens for call in calls),
        longest_call_tokens=max(call.prompt_tokens + call.output_tokens for call in calls),
    )
