"""When do newcomers enter the engine: at once, in waves, or when everybody before them is done?

    python -m tests.perf.admission_waves [--seconds 1800]

The real scheduler on a virtual clock with the machine of ``tests.office``: eight slots, questions of 200 to 1,000
tokens behind one of three system prompts of 1,500, answers of 50 to 200. Waits are from asking to the first token.

    at once        into the scheduler before its next step
    full 5 ms      gathered for 5 ms while no slot is free, else at once: what the replica does
    always 10 ms   gathered for 10 ms in any case: what ``@serve.batch`` does
    aligned        gathered until all answers that run are complete: waves that begin and end together
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from engine.batch import SampledToken, StepBatch, StepOutput
from engine.request import EngineRequest, SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler.config import SchedulerConfig
from tests.office import Machine, office_config, percentile

SLOTS = 8
NUM_HEADS = 3
HEAD_TOKENS = 1_500
RATES_PER_S = (0.4, 0.7, 0.9)
BURST = 10


@dataclass
class Asked:
    """One request on its way."""

    request: EngineRequest
    arrived_s: float


@dataclass
class Gate:
    """Holds newcomers back. ``opens``: when those who wait since a time may enter, given the state of the engine."""

    opens: Callable[[float, bool, bool], float]
    held: list[Asked] = field(default_factory=list)

    def take(self, now_s: float, is_full: bool, is_idle: bool) -> list[Asked]:
        """Who enters now."""
        if not self.held or self.opens(self.held[0].arrived_s, is_full, is_idle) > now_s:
            return []
        entering, self.held = self.held, []
        return entering


RULES: dict[str, Callable[[float, bool, bool], float]] = {
    "at once": lambda since_s, _full, _idle: since_s,
    "full 5 ms": lambda since_s, full, _idle: since_s + 0.005 * full,
    "always 10 ms": lambda since_s, _full, _idle: since_s + 0.010,
    "aligned": lambda since_s, _full, idle: since_s if idle else float("inf"),
}


@dataclass
class Outcome:
    """What came of a run."""

    first_token_s: list[float] = field(default_factory=list)
    finished_s: list[float] = field(default_factory=list)
    num_computed: int = 0
    num_prompt: int = 0
    num_rows: int = 0
    num_steps: int = 0
    num_entries: int = 0


def steady(rate_per_s: float, duration_s: float, seed: int = 3) -> Iterator[Asked]:
    """Questions as they come by chance."""
    draw = random.Random(seed)
    now_s, number = 0.0, 0
    while (now_s := now_s + draw.expovariate(rate_per_s)) < duration_s:
        number += 1
        yield _asked(f"r{number}", draw, number % NUM_HEADS, now_s)


def bursts(duration_s: float, seed: int = 3) -> Iterator[Asked]:
    """Ten questions on one document within a tenth of a second, every 20 seconds; each document is new."""
    draw = random.Random(seed)
    for number in range(int(duration_s / 20)):
        for place in range(BURST):
            yield _asked(f"b{number}-{place}", draw, 100 + number, 20.0 * number + 0.01 * place)


def _asked(name: str, draw: random.Random, head: int, now_s: float) -> Asked:
    question = tuple(draw.randrange(1_000, 50_000) for _ in range(draw.randint(200, 1_000)))
    prompt = tuple(head * 7 + i % 5 for i in range(HEAD_TOKENS)) + question
    sampling = SamplingParams(max_tokens=draw.randint(50, 200), ignore_eos=True)
    return Asked(EngineRequest(name, prompt, sampling, now_s), now_s)


def run(arrivals: Iterator[Asked], opens: Callable[[float, bool, bool], float], config: SchedulerConfig) -> Outcome:
    """Let everybody through and wait for all answers."""
    scheduler, machine, gate, outcome = Scheduler(config), Machine(), Gate(opens), Outcome()
    coming = iter(sorted(arrivals, key=lambda asked: asked.arrived_s))
    following = next(coming, None)
    asked_s: dict[str, float] = {}
    now_s = 0.0
    while following is not None or gate.held or scheduler.has_unfinished:
        while following is not None and following.arrived_s <= now_s:
            gate.held.append(following)
            following = next(coming, None)
        stats = scheduler.stats(now_s)
        is_full = stats.num_running >= config.slots or stats.num_waiting > 0
        entering = gate.take(now_s, is_full, not scheduler.has_unfinished)
        outcome.num_entries += bool(entering)
        for asked in entering:
            asked_s[asked.request.request_id] = asked.arrived_s
            scheduler.add(asked.request, now_s)
        batch = scheduler.schedule(now_s)
        scheduler.take_released()
        if batch is None:
            # Idle: until somebody comes, or those who are held may enter.
            moments = [following.arrived_s] if following is not None else []
            moments += [gate.opens(gate.held[0].arrived_s, False, True)] if gate.held else []
            now_s = max(now_s, min(moments))
            continue
        now_s += _step(scheduler, batch, machine, now_s, asked_s, outcome)
    return outcome


def _step(
    scheduler: Scheduler, batch: StepBatch, machine: Machine, now_s: float, asked_s: dict[str, float], outcome: Outcome
) -> float:
    elapsed_s = machine.step_s(batch)
    outcome.num_computed += batch.num_tokens
    outcome.num_rows += len(batch.rows)
    outcome.num_steps += 1
    tokens = {row.request_id: SampledToken(1) for row in batch.rows if row.samples}
    for output in scheduler.update(batch, StepOutput(batch.step_index, tokens, elapsed_s), now_s + elapsed_s):
        if output.finish_reason is not None:
            began_s = asked_s.pop(output.request_id)
            assert output.timeline is not None
            assert output.timeline.first_token_s is not None
            outcome.first_token_s.append(output.timeline.first_token_s - began_s)
            outcome.finished_s.append(now_s + elapsed_s - began_s)
    return elapsed_s


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1_800.0)
    arguments = parser.parse_args()
    config = office_config(slots=SLOTS, prefix_cache="shared")
    print(
        "| arrivals | rule | first token p50 / p95 s | whole answer mean s | rows a step | tokens computed | entries |"
    )
    print("|---|---|---|---|---|---|---|")
    loads: dict[str, Callable[[], Iterator[Asked]]]
    loads = {f"{rate:g} /s": partial(steady, rate, arguments.seconds) for rate in RATES_PER_S}
    loads[f"{BURST} at once, one document"] = partial(bursts, arguments.seconds)
    for load, arrivals in loads.items():
        for rule, opens in RULES.items():
            done = run(arrivals(), opens, config)
            cells = (
                load,
                rule,
                f"{percentile(done.first_token_s, 0.5):.3f} / {percentile(done.first_token_s, 0.95):.3f}",
                f"{sum(done.finished_s) / len(done.finished_s):.2f}",
                f"{done.num_rows / done.num_steps:.2f}",
                f"{done.num_computed}",
                f"{done.num_entries}",
            )
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
