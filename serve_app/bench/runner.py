"""Runs a plan against one endpoint or against several in turn.

Owns: warm-up, the order of loads, and what is measured around each. Must not know: processes, files or tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from serve_app.bench.client import Answer, StreamClient, StreamRecord, read_answer
from serve_app.bench.document import AnswerCheck, LevelRun
from serve_app.bench.errors import BenchError
from serve_app.bench.load import (
    EncodedSession,
    LoadRecord,
    encode_sessions,
    run_closed,
    run_open,
)
from serve_app.bench.machine import CpuMeter, busy_cores
from serve_app.bench.plan import BenchPlan, Level
from serve_app.bench.prompts import PromptWriter, TokenCounter, WrittenSession, encode_body
from serve_app.bench.results import read_load
from serve_app.bench.status_probe import SlotSample, watching
from serve_app.bench.target import Target
from serve_app.capacity.workload import PlannedSession, plan_session, poisson_arrivals_s

SHOWN_CHARACTERS = 40

Report = Callable[[str, float | None], None]


@dataclass(frozen=True, slots=True)
class TargetRuns:
    """What was measured at one endpoint."""

    target: Target
    runs: tuple[LevelRun, ...]
    answers: AnswerCheck | None


async def run_plan(
    targets: Sequence[Target], plan: BenchPlan, count_tokens: TokenCounter | None, report: Report
) -> tuple[TargetRuns, ...]:
    """Run every load of ``plan`` at every target, one after the other.

    Each load goes to all targets before the next one starts, and the target that begins changes, so that a machine that
    grows slower or busier over the run does so for all of them.
    """
    benches = [TargetBench(target, plan, count_tokens) for target in targets]
    for bench in benches:
        report(f"warming up {bench.target.label}", None)
        await bench.warm_up()
    deadline_s = time.monotonic() + plan.max_total_s
    steps = list(_steps(benches, plan))
    for number, (bench, level, repeat) in enumerate(steps):
        if time.monotonic() >= deadline_s:
            break

        def show(part: float, number: int = number, title: str = f"{bench.target.label}, {level}") -> None:
            report(title, (number + part) / len(steps))

        show(0.0)
        await bench.run_load(level, repeat, show)
    report("comparing answers with the same requests sent alone", None)
    return tuple([await bench.finish() for bench in benches])


def _steps(benches: Sequence[TargetBench], plan: BenchPlan) -> Iterator[tuple[TargetBench, Level, int]]:
    for number, (repeat, level) in enumerate(plan.loads()):
        for turn in range(len(benches)):
            yield benches[(turn + number) % len(benches)], level, repeat


class TargetBench:
    """The loads of one target. ``runs`` grows with every load."""

    def __init__(self, target: Target, plan: BenchPlan, count_tokens: TokenCounter | None) -> None:
        self.target = target
        self._plan = plan
        self._count_tokens = count_tokens
        self.runs: list[LevelRun] = []

    async def warm_up(self) -> None:
        """Send a few requests of the workload, alone. Raises BenchError when one fails: the load would too."""
        for number in range(self._plan.num_warmups):
            answer = await self._ask_alone(f"{self._plan.seed}/warm-up/{number}", 0, 0)
            if answer.error is not None:
                what = f"The first request to {self.target.label} failed: {answer.error}"
                raise BenchError(what, "mend that first: every request of the load would fail")

    async def run_load(self, level: Level, repeat: int, show: Callable[[float], None]) -> LevelRun:
        """Run one load, keep what was measured and return it. ``show`` is told the share that is done."""
        seed = self._plan.seed_of(level, repeat)
        written = (self._written(seed, session) for session in self._plan.sessions(level, repeat))
        sessions = encode_sessions(tuple(written), self.target.extra)
        done = _Counter(sum(len(session.calls) for session in sessions), show)
        idle_cores = await busy_cores(self._plan.idle_sample_s)
        meter = CpuMeter(self.target.process_id)
        async with self._client() as client, self._watching() as slots:
            record = await self._send(client, level, seed, sessions, done.one_more)
        result = read_load(record, self._plan.service_level)
        run = LevelRun(level, repeat, seed, result, tuple(slots), meter.used(), idle_cores)
        self.runs.append(run)
        return run

    async def finish(self) -> TargetRuns:
        """Check some answers of the fullest load and hand over what was measured."""
        return TargetRuns(self.target, tuple(self.runs), await self._check_answers())

    def _client(self) -> StreamClient:
        url = self.target.url(self._plan.workload.endpoint)
        target = self.target
        return StreamClient(url, api_key=target.api_key, timeout_s=self._plan.max_level_s, trust=target.trust)

    def _watching(self) -> AbstractAsyncContextManager[list[SlotSample]]:
        return watching(self.target.base_url, self.target.api_key, self.target.trust)

    def _written(self, seed: str, session: PlannedSession) -> WrittenSession:
        return PromptWriter(seed, self._count_tokens).write(self._plan.workload, session)

    async def _send(
        self,
        client: StreamClient,
        level: Level,
        seed: str,
        sessions: Sequence[EncodedSession],
        on_done: Callable[[], None],
    ) -> LoadRecord:
        if level.num_clients is not None:
            return await run_closed(client, sessions, level.num_clients, self._plan.max_level_s, on_done)
        arrivals_s = tuple(poisson_arrivals_s(seed, level.rate_per_s or 1.0, len(sessions)))
        return await run_open(client, sessions, arrivals_s, self._plan.max_level_s, on_done)

    async def _ask_alone(self, seed: str, session_index: int, call_index: int) -> Answer:
        session = self._written(seed, plan_session(self._plan.workload, seed, session_index))
        record = StreamRecord()
        async with self._client() as client:
            await client.stream(encode_body(session.calls[call_index], self.target.extra), record)
        return read_answer(record)

    async def _check_answers(self) -> AnswerCheck | None:
        """Greedy answers must not depend on what else is in the batch: send some requests again, alone, and compare."""
        if not self.runs or not self._plan.num_answers_checked:
            return None
        fullest = max(self.runs, key=lambda run: run.result.summary.num_requests)
        answered = [call for call in fullest.result.calls if call.timing is not None]
        chosen = answered[:: max(1, len(answered) // self._plan.num_answers_checked)][: self._plan.num_answers_checked]
        num_equal = 0
        difference: tuple[int, str, str] | None = None
        for call in chosen:
            alone = await self._ask_alone(fullest.seed, call.session_index, call.call_index)
            if alone.text == call.text:
                num_equal += 1
            elif difference is None:
                difference = _first_difference(call.text, alone.text)
        return AnswerCheck(len(chosen), num_equal, difference)


@dataclass(slots=True)
class _Counter:
    """Counts finished requests of a load for the progress bar."""

    num_calls: int
    show: Callable[[float], None]
    num_done: int = 0

    def one_more(self) -> None:
        self.num_done += 1
        self.show(self.num_done / self.num_calls)


def _first_difference(under_load: str, alone: str) -> tuple[int, str, str]:
    pairs = zip(under_load, alone, strict=False)
    shorter = min(len(under_load), len(alone))
    place = next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)
    return place, under_load[place : place + SHOWN_CHARACTERS], alone[place : place + SHOWN_CHARACTERS]
