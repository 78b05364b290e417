"""How many machines, with how many slots, answer a demand well enough.

Owns: the cost of a call, the closed-form bound, the search over machines and slots, what binds, and the assumptions in
words. Must not know: files, the command line, or how a step's time was found.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from serve_app.capacity.demand import Answers, Demand, FleetLevel, summarize_answers
from serve_app.capacity.dispatch import CentralLine, Dispatch
from serve_app.capacity.machine import MachineSpec, chunk_beside
from serve_app.capacity.one_slot import applies_to, simulate_one_slot
from serve_app.capacity.perf_model import StepTimes, chunk_s, decode_rows_s
from serve_app.capacity.queueing import QueueWait, mmc_wait, saturated_service_s
from serve_app.capacity.simulator import Load, Simulation, simulate

# A load this close to saturation has no steady state that a simulation of some thousand calls could show.
STABLE_BELOW = 0.985
# Longest span of virtual time that one decision may cover while prompts are read: fine beside waits of seconds.
GRANULARITY_S = 0.25
MAX_STEPS_AT_ONCE = 64
MAX_MACHINES = 10_000
RUNS_PER_ROUND = 4
MIN_ERROR_S = 0.025
# The shortcut for one slot is so much cheaper that its runs may be this much longer.
PLAIN_FACTOR = 10
# Runs have this length where this share of the fleet is idle.
USUAL_CALLS = 4000
USUAL_IDLE = 0.35
MAX_LONGER = 8.0
# A run begins with an empty fleet. It lasts for so many times what a call takes alone, so that the first 5%, which are
# left out, last for three: a thousand machines have answered 4,000 calls before the first of them is full.
CALL_TIMES_PER_RUN = 60
# In a large fleet the fewest machines are looked for to a hundredth of them.
MAX_STEPS_OF_FLEET = 100
E2E_FACTOR = 3.0


@dataclass(frozen=True, slots=True)
class CallCost:
    """Mean machine time of a call answered alone, the spread of it, and lengths of prompt and answer together."""

    prefill_s: float
    decode_s: float
    squared_cv: float
    mean_tokens: float
    longest_tokens: int
    calls_per_session: float

    @property
    def alone_s(self) -> float:
        """Prompt and answer, nobody else on the machine."""
        return self.prefill_s + self.decode_s


@dataclass(frozen=True, slots=True)
class MachineKind:
    """A machine to buy: its step times by slots used, its settings, and the KV positions that its memory holds for a
    number of slots (None: memory is left out of account)."""

    name: str
    times: StepTimes
    kv_tokens: Callable[[int], int] | None = None
    decode_share: float | None = None
    target_stall_s: float = 0.5
    max_chunk_tokens: int = 512

    def spec(self, slots: int, longest_call_tokens: int, *, prefix_cache: bool) -> MachineSpec:
        """The machine with ``slots`` slots.

        A ``decode_share`` (decoding's share of the time while a prompt is read) becomes the stall target that gives it
        with half of the slots decoding.
        """
        target_stall_s = self.target_stall_s
        if self.decode_share is not None:
            target_stall_s = decode_rows_s(self.times, max(1, slots // 2)) / self.decode_share
        return MachineSpec(
            name=self.name,
            times=self.times,
            slots=slots,
            longest_call_tokens=longest_call_tokens,
            kv_tokens=None if self.kv_tokens is None else self.kv_tokens(slots),
            target_stall_s=target_stall_s,
            max_chunk_tokens=self.max_chunk_tokens,
            prefix_cache=prefix_cache,
        )


@dataclass(frozen=True, slots=True)
class Option:
    """A fleet and how it fares. Figures are None when the load is unstable: a line that grows has no mean wait.

    ``utilisation``: share of time that machines are busy, or demanded work over capacity when unstable. ``bound``: what
    M/M/c says of the same fleet with its machines as single servers.
    """

    macs: int
    slots: int
    stable: bool
    utilisation: float
    answers: Answers | None
    missed: tuple[str, ...]
    binds: str
    bound: QueueWait

    @property
    def meets_slo(self) -> bool:
        """Stable, and every bound kept."""
        return self.stable and not self.missed


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation, as a value that another process can be given. ``is_plain``: one slot, one line, no caches."""

    specs: tuple[MachineSpec, ...]
    load: Load
    dispatch: Callable[[], Dispatch]
    steps_at_once: int
    is_plain: bool


def run_simulation(run: Run) -> Simulation:
    """Simulate ``run``, by the shortcut where it holds."""
    if run.is_plain:
        return simulate_one_slot(run.specs, run.load)
    return simulate(run.specs, run.load, run.dispatch(), run.steps_at_once)


class RunAll(Protocol):
    """Simulates several runs, side by side if it can, and returns their results in order."""

    def __call__(self, runs: Sequence[Run], /) -> Sequence[Simulation]:
        """Simulate all."""
        ...


def one_by_one(runs: Sequence[Run]) -> list[Simulation]:
    """Simulate in this process."""
    return [run_simulation(run) for run in runs]


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """``dispatch`` makes the rule by which calls find machines.

    Runs of ``calls_per_run`` calls each (None: as many as the fleet needs to fill, and more), with seeds of their own,
    are added until the mean wait is known to ``precision`` of itself or ``MIN_ERROR_S`` (one standard error), but no
    more than ``max_runs``. How many that takes depends on the seed alone and not on the machine that simulates.
    """

    level: FleetLevel
    calls_per_run: int | None = None
    max_runs: int = 24
    precision: float = 0.025
    seed: str = "7"
    dispatch: Callable[[], Dispatch] = CentralLine
    run_all: RunAll = one_by_one


@dataclass(frozen=True, slots=True)
class Planner:
    """Answers for one demand on one kind of machine."""

    demand: Demand
    kind: MachineKind
    settings: PlanSettings
    cost: CallCost = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cost", call_cost(self.demand, self.kind.times))

    @property
    def level(self) -> FleetLevel:
        """The service level, with a bound on end-to-end time even where none was asked for."""
        level = self.settings.level
        if level.e2e_p95_s is None:
            level = replace(level, e2e_p95_s=E2E_FACTOR * self.cost.alone_s)
        return level

    def option(self, macs: int, slots: int, *, quick: bool = False) -> Option:
        """How ``macs`` machines of ``slots`` slots fare; ``quick`` from a single run."""
        work_s = self.work_s(slots)
        bound = mmc_wait(macs, self.demand.calls_per_s, work_s)
        demanded = self.demand.calls_per_s * work_s / macs
        if demanded >= STABLE_BELOW:
            return Option(macs, slots, False, demanded, None, (), self._binds(slots, ()), bound)
        simulations = self.simulate(macs, slots, 1 if quick else self.settings.max_runs)
        answers = summarize_answers([result.timing for each in simulations for result in each.results])
        missed = tuple(
            f"{name} {value:.3g} s, bound {limit:.3g} s" for name, (limit, value) in answers.missed(self.level).items()
        )
        busy_s = sum(use.busy_s for each in simulations for use in each.uses)
        busy = busy_s / (macs * sum(each.duration_s for each in simulations))
        return Option(macs, slots, True, busy, answers, missed, self._binds(slots, simulations), bound)

    def smallest(self, slots: int) -> Option:
        """The fewest machines that meet the service level with ``slots`` slots.

        Quick looks find the place, upwards in growing steps and back by halves; a precise one has the last word. From
        two hundred machines on the answer may be a hundredth too large.
        """
        low = max(1, math.floor(self.demand.calls_per_s * self.work_s(slots) / STABLE_BELOW))
        high = low
        while not self.option(high, slots, quick=True).meets_slo and high < MAX_MACHINES:
            low, high = high, high + max(1, high // 8)
        step = max(1, high // MAX_STEPS_OF_FLEET)
        while high - low > step:
            middle = (low + high) // 2
            meets = self.option(middle, slots, quick=True).meets_slo
            low, high = (low, middle) if meets else (middle, high)
        best = self.option(high, slots)
        while not best.meets_slo and high < MAX_MACHINES:
            high += step
            best = self.option(high, slots)
        return best

    def work_s(self, slots: int) -> float:
        """Machine time a call costs with all slots in use."""
        context = self.cost.mean_tokens
        gain = slots * decode_rows_s(self.kind.times, 1, context) / decode_rows_s(self.kind.times, slots, context)
        return saturated_service_s(self.cost.prefill_s, self.cost.decode_s, gain)

    def simulate(self, macs: int, slots: int, max_runs: int) -> list[Simulation]:
        """Drive the real scheduler through the demand until the mean wait is known well enough."""
        simulations: list[Simulation] = []
        while len(simulations) < max_runs and not self._is_precise(simulations):
            first = len(simulations)
            last = min(max_runs, first + RUNS_PER_ROUND)
            simulations += self.settings.run_all([self._run(macs, slots, number) for number in range(first, last)])
        return simulations

    def _run(self, macs: int, slots: int, number: int) -> Run:
        shares = any(each.shared_prefix or each.calls.mean > 1 for each in self.demand.workload.sessions)
        spec = self.kind.spec(slots, self.cost.longest_tokens, prefix_cache=shares)
        calls_per_session = self.cost.calls_per_session
        is_plain = slots == 1 and self.settings.dispatch is CentralLine and applies_to(self.demand.workload)
        num_calls = self._num_calls(PLAIN_FACTOR if is_plain else self._longer(macs, slots))
        num_sessions = max(1, math.ceil(num_calls / calls_per_session))
        seed = f"{self.settings.seed}/{number}"
        load = Load(self.demand.workload, self.demand.calls_per_s / calls_per_session, num_sessions, seed)
        return Run((spec,) * macs, load, self.settings.dispatch, steps_at_once(spec), is_plain)

    def _num_calls(self, longer: float) -> int:
        if self.settings.calls_per_run is not None:
            return round(self.settings.calls_per_run * longer)
        filling = CALL_TIMES_PER_RUN * self.demand.calls_per_s * self.cost.alone_s
        return round(max(USUAL_CALLS * longer, filling))

    def _longer(self, macs: int, slots: int) -> float:
        """How much longer than usual a run must be: a busy fleet forgets that it began empty in proportion to
        1 / (1 - utilisation) squared."""
        idle = 1 - self.demand.calls_per_s * self.work_s(slots) / macs
        return min(MAX_LONGER, max(1.0, (USUAL_IDLE / idle) ** 2))

    def _is_precise(self, simulations: Sequence[Simulation]) -> bool:
        if len(simulations) < RUNS_PER_ROUND:
            return False
        means = [_mean_wait_s(each) for each in simulations]
        error_s = statistics.stdev(means) / math.sqrt(len(means))
        return error_s <= max(MIN_ERROR_S, self.settings.precision * statistics.fmean(means))

    def _binds(self, slots: int, simulations: Sequence[Simulation]) -> str:
        results = [result for each in simulations for result in each.results]
        waited_s = sum(result.timing.queue_s or 0.0 for result in results)
        if 2 * sum(result.waited_for_blocks_s for result in results) > waited_s > 0:
            return "memory"
        decode_s = self.work_s(slots) - self.cost.prefill_s
        return "prefill" if self.cost.prefill_s > decode_s else "bandwidth"


def _mean_wait_s(simulation: Simulation) -> float:
    waits_s = [result.timing.queue_s or 0.0 for result in simulation.results]
    return statistics.fmean(waits_s) if waits_s else 0.0


def call_cost(demand: Demand, times: StepTimes) -> CallCost:
    """What a call costs alone: its unread prompt tokens in chunks, its answer a token a step."""
    token_s = chunk_s(times, 512) / 512
    prefills, services, lengths = [], [], []
    sampled = demand.sampled()
    for session in sampled:
        for index, call in enumerate(session.calls):
            cached = session.prefix_tokens if index == 0 else 0
            prefills.append((call.new_tokens - cached) * token_s)
            context = call.prompt_tokens + call.output_tokens / 2
            services.append(prefills[-1] + (call.output_tokens - 1) * decode_rows_s(times, 1, context))
            lengths.append(call.prompt_tokens + call.output_tokens)
    mean = sum(services) / len(services)
    variance = sum((service - mean) ** 2 for service in services) / len(services)
    prefill_s = sum(prefills) / len(prefills)
    # Longer calls than any of the sample may be drawn; the pool and the context must hold them.
    mean_tokens = sum(lengths) / len(lengths)
    calls_per_session = len(services) / len(sampled)
    return CallCost(prefill_s, mean - prefill_s, variance / mean**2, mean_tokens, 4 * max(lengths), calls_per_session)


def steps_at_once(spec: MachineSpec) -> int:
    """How many steps with prompts in them one decision may cover without showing in waits of seconds."""
    rows = max(1, spec.slots // 2)
    chunk = chunk_beside(spec, rows)
    step_s = decode_rows_s(spec.times, rows) + chunk_s(spec.times, round(chunk))
    return max(1, min(MAX_STEPS_AT_ONCE, int(GRANULARITY_S / step_s)))


def sensitivity(planner: Planner, option: Option) -> Iterator[tuple[str, Option]]:
    """The same fleet when things change: the questions that are asked after the first answer."""
    changed: Sequence[tuple[str, Demand, int]] = (
        ("prompts twice as long", planner.demand.with_longer_prompts(2.0), option.macs),
        ("twice as many calls (agents)", planner.demand.more_often(2.0), option.macs),
        ("one Mac fails", planner.demand, option.macs - 1),
    )
    for name, demand, macs in changed:
        if macs >= 1:
            yield name, replace(planner, demand=demand).option(macs, option.slots)
