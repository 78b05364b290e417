"""What one scheduling step costs on this machine, in CPU milliseconds of one core.

    python -m tests.perf.scheduler_cost [--steps 300] [--json]

Decode steps of a full engine while others wait, at several sizes; every step is ``schedule`` + ``update`` with a token
for every row, nothing of the model. Besides: admission of a long prompt that is found in the prefix cache (its blocks
are looked up one by one), and a step in which requests leave and others take their slots. Process time, not wall time,
so that a busy machine changes little. No bound is asserted here; tests do not depend on speed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from time import process_time

from engine.batch import SampledToken, StepBatch, StepOutput
from engine.request import EngineRequest, SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig

SIZES = (
    (16, 0, 1),
    (32, 0, 1),
    (64, 0, 1),
    (128, 0, 1),
    (128, 500, 1),
    (128, 2_000, 1),
    (128, 2_000, 2_000),
    (128, 20_000, 50),
)
BLOCK_SIZE = 16
STEP_S = 0.03


@dataclass(frozen=True)
class Cost:
    """Medians and the worst in a hundred, over the measured steps."""

    what: str
    num_running: int
    num_waiting: int
    num_users: int
    schedule_ms: float
    update_ms: float
    total_p99_ms: float
    us_per_request: float


class Engine:
    """A scheduler whose every step takes 30 virtual milliseconds."""

    def __init__(self, slots: int, max_model_len: int = 2048) -> None:
        self.now_s = 0.0
        self.scheduler = Scheduler(
            SchedulerConfig(
                slots=slots,
                num_blocks=slots * max_model_len // BLOCK_SIZE,
                block_size=BLOCK_SIZE,
                max_model_len=max_model_len,
                max_waiting_requests=10**9,
                max_waiting_tokens=10**12,
                max_chunk_tokens=2048,
            )
        )

    def add(self, request_id: str, prompt: tuple[int, ...], max_tokens: int, user: str) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.scheduler.add(EngineRequest(request_id, prompt, sampling, self.now_s, user=user), self.now_s)

    def step(self) -> tuple[StepBatch, float, float]:
        """The batch, and the seconds that schedule and update took."""
        begin = process_time()
        batch = self.scheduler.schedule(self.now_s)
        self.scheduler.take_released()
        scheduled = process_time()
        assert batch is not None
        tokens = {row.request_id: SampledToken(5) for row in batch.rows if row.samples}
        output = StepOutput(batch.step_index, tokens, STEP_S)
        self.now_s += STEP_S
        resumed = process_time()
        self.scheduler.update(batch, output, self.now_s)
        return batch, scheduled - begin, process_time() - resumed


def prompts(num_tokens: int) -> Iterator[tuple[int, ...]]:
    """Prompts that share nothing."""
    for number in count():
        yield tuple((number * 7919 + position * 31) % 50_000 for position in range(num_tokens))


def summarise(what: str, size: tuple[int, int, int], times: list[tuple[float, float]]) -> Cost:
    schedule, update, total = (sorted(values) for values in zip(*((s, u, s + u) for s, u in times), strict=True))
    middle = len(times) // 2
    return Cost(
        what,
        *size,
        schedule_ms=round(1e3 * schedule[middle], 3),
        update_ms=round(1e3 * update[middle], 3),
        total_p99_ms=round(1e3 * total[int(0.99 * len(times))], 3),
        us_per_request=round(1e6 * total[middle] / size[0], 2),
    )


def decode_cost(size: tuple[int, int, int], num_steps: int) -> Cost:
    """All slots decode; nobody comes or goes."""
    num_running, num_waiting, num_users = size
    engine = Engine(num_running)
    source = prompts(100)
    for number in range(num_running + num_waiting):
        engine.add(f"r{number}", next(source), num_steps + 1_000, f"u{number % num_users}")
    while len(engine.step()[0].rows) < num_running:
        pass
    engine.step()
    return summarise("decode", size, [engine.step()[1:] for _ in range(num_steps)])


def turnover_cost(size: tuple[int, int, int], num_steps: int) -> Cost:
    """Answers of 16 tokens: in every step an eighth of an eighth leaves and as many are admitted."""
    num_running, num_waiting, num_users = size
    engine = Engine(num_running)
    source = prompts(100)
    numbers = count()
    times: list[tuple[float, float]] = []
    for step in range(num_steps + 100):
        while engine.scheduler.stats(engine.now_s).num_waiting < num_waiting:
            number = next(numbers)
            engine.add(f"r{number}", next(source), 16 + number % 5, f"u{number % num_users}")
        _, schedule_s, update_s = engine.step()
        if step >= 100:
            times.append((schedule_s, update_s))
    return summarise("turnover", size, times)


def long_hit_cost(num_tokens: int) -> Cost:
    """A prompt of which everything is cached: one lookup per block, then one row."""
    engine = Engine(1, num_tokens + 64)
    prompt = next(prompts(num_tokens))
    engine.add("first", prompt, 2, "")
    while engine.scheduler.has_unfinished:
        engine.step()
    times = []
    for number in range(9):
        engine.add(f"again{number}", prompt, 1, "")
        times.append(engine.step()[1:])
    return summarise(f"hit of {num_tokens} tokens", (1, 0, 1), times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="measured steps per size")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    arguments = parser.parse_args()
    costs = [decode_cost(size, arguments.steps) for size in SIZES]
    costs.append(turnover_cost((128, 2_000, 50), arguments.steps))
    costs += [long_hit_cost(num_tokens) for num_tokens in (8_192, 32_768, 131_072)]
    if arguments.json:
        for cost in costs:
            print(json.dumps(asdict(cost)))
        return
    print("| what | running | waiting | users | schedule ms | update ms | both, p99 ms | us per request |")
    print("|---|---|---|---|---|---|---|---|")
    for cost in costs:
        print("| " + " | ".join(str(value) for value in asdict(cost).values()) + " |")


if __name__ == "__main__":
    main()
