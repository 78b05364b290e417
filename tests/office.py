"""The office's load on a virtual clock: the real scheduler, a machine that is a formula, people who are seeds.

``Machine`` is a middling Mac in numbers: 30 tokens/s alone and 8 rows for the time of 1.4, reading 3,000 tokens/s,
attention to long contexts on top. Every step is a little off its formula, and one in five hundred takes five times as
long.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from engine.batch import SampledToken, StepBatch, StepOutput
from engine.request import EngineRequest, SamplingParams, Timeline
from engine.scheduler import Scheduler, SchedulerConfig


@dataclass
class Machine:
    """Seconds of a step."""

    fixed_s: float = 0.030
    per_row_s: float = 0.002
    per_token_s: float = 1 / 3000
    per_context_token_s: float = 1e-7
    per_pair_s: float = 1e-8
    noise: random.Random = field(default_factory=lambda: random.Random(1))

    def step_s(self, batch: StepBatch) -> float:
        seconds = self.fixed_s
        for row in batch.rows:
            end = row.start + row.num_tokens
            if row.num_tokens == 1:
                seconds += self.per_row_s + self.per_context_token_s * end
            else:
                seconds += self.per_token_s * row.num_tokens
                seconds += self.per_pair_s * (row.start + end + 1) / 2 * row.num_tokens
        return seconds * self.noise.lognormvariate(0.0, 0.05) * (5.0 if self.noise.random() < 0.002 else 1.0)


@dataclass
class Person:
    """Asks after ``think_s`` on average; lengths are ranges. ``closed``: thinks only once the answer is there."""

    name: str
    kind: str
    think_s: float
    prompt: tuple[int, int]
    answer: tuple[int, int]
    closed: bool = False
    at_once: int = 1


@dataclass
class Asked:
    """One finished request."""

    kind: str
    user: str
    num_prompt_tokens: int
    timeline: Timeline
    predicted_wait_s: float | None

    @property
    def wait_s(self) -> float:
        assert self.timeline.prefill_started_s is not None
        return self.timeline.prefill_started_s - self.timeline.received_s


class Office:
    """Runs people against one engine for ``duration_s`` and keeps what finished."""

    def __init__(self, people: Iterable[Person], config: SchedulerConfig, machine: Machine, seed: int = 7) -> None:
        self.scheduler = Scheduler(config)
        self.finished: list[Asked] = []
        self.num_computed: Counter[str] = Counter()
        self.step_s: list[tuple[int, int, float]] = []
        self._machine = machine
        self._seed = seed
        self._draws: dict[str, random.Random] = {}
        self._numbers = count()
        self.watch_predictions = False
        self.knows_users = True
        self._open: dict[str, tuple[Person, int, float | None]] = {}
        self._arrivals: list[tuple[float, int, Person]] = []
        for person in people:
            for _ in range(person.at_once):
                self._ask_again(person, 0.0)

    def run(self, duration_s: float) -> Office:
        now_s = 0.0
        while now_s < duration_s:
            while self._arrivals and self._arrivals[0][0] <= now_s:
                at_s, _, person = heapq.heappop(self._arrivals)
                self._ask(person, at_s, now_s)
            batch = self.scheduler.schedule(now_s)
            self.scheduler.take_released()
            if batch is None:
                now_s = self._arrivals[0][0]
                continue
            elapsed_s = self._machine.step_s(batch)
            now_s += elapsed_s
            num_decoding = sum(1 for row in batch.rows if row.num_tokens == 1)
            self.step_s.append((num_decoding, batch.num_tokens - num_decoding, elapsed_s))
            for row in batch.rows:
                self.num_computed[self._open[row.request_id][0].kind] += row.num_tokens
            tokens = {row.request_id: SampledToken(1) for row in batch.rows if row.samples}
            for output in self.scheduler.update(batch, StepOutput(batch.step_index, tokens, elapsed_s), now_s):
                if output.finish_reason is not None:
                    person, num_prompt, predicted_s = self._open.pop(output.request_id)
                    self.finished.append(Asked(person.kind, person.name, num_prompt, output.timeline, predicted_s))
                    if person.closed:
                        self._ask_again(person, now_s)
        return self

    def of(self, kind: str) -> list[Asked]:
        return [asked for asked in self.finished if asked.kind == kind]

    def _ask(self, person: Person, at_s: float, now_s: float) -> None:
        draw = self._draw_of(person)
        num_prompt = draw.randint(*person.prompt)
        prompt = (1,) * num_prompt
        request_id = f"{person.name}-{next(self._numbers)}"
        sampling = SamplingParams(max_tokens=draw.randint(*person.answer), ignore_eos=True)
        predicted_s = self.scheduler.stats(now_s).predicted_wait_s if self.watch_predictions else None
        self._open[request_id] = (person, num_prompt, predicted_s)
        user = person.name if self.knows_users else ""
        self.scheduler.add(EngineRequest(request_id, prompt, sampling, at_s, user=user), now_s)
        if not person.closed:
            self._ask_again(person, at_s)

    def _ask_again(self, person: Person, now_s: float) -> None:
        pause_s = self._draw_of(person).expovariate(1 / person.think_s)
        heapq.heappush(self._arrivals, (now_s + pause_s, next(self._numbers), person))

    def _draw_of(self, person: Person) -> random.Random:
        """Everybody's own dice: who else is there changes nobody's questions."""
        if person.name not in self._draws:
            self._draws[person.name] = random.Random(f"{self._seed} {person.name}")
        return self._draws[person.name]


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def office_config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "slots": 16,
        "num_blocks": 16 * 2048,
        "block_size": 16,
        "max_model_len": 32_768,
        "max_waiting_requests": 1000,
        "target_stall_s": 0.12,
        "max_chunk_tokens": 512,
        "prefix_cache": "off",
    }
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


def askers(number: int) -> list[Person]:
    """Short questions, one every half minute each."""
    return [
        Person(f"asker-{i}", "short", 30.0, prompt=(100, 1_000), answer=(20, 60), closed=True) for i in range(number)
    ]


def readers(number: int) -> list[Person]:
    """Long documents, one after the other."""
    return [
        Person(f"reader-{i}", "long", 2.0, prompt=(12_000, 12_000), answer=(100, 200), closed=True)
        for i in range(number)
    ]


def agent(at_once: int) -> Person:
    """One user who has ``at_once`` requests open all the time."""
    return Person("agent", "agent", 0.1, prompt=(500, 4_000), answer=(50, 200), closed=True, at_once=at_once)
