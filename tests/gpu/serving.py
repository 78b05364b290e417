"""Runs requests through scheduler, core and GPU runner, and through mlx-lm's BatchGenerator, with the same clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from engine.batch import BatchRow, StepBatch
from engine.core.engine_core import EngineCore
from engine.interfaces import ModelRunner
from engine.request import EngineRequest, SamplingParams, TokenOutput
from engine.scheduler.scheduler import Scheduler, SchedulerConfig

Batches = Callable[[int], StepBatch]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Work:
    """One request."""

    prompt: tuple[int, ...]
    num_output: int
    sampling: SamplingParams = GREEDY


@dataclass
class Run:
    """What happened: when each token of each request came, and the peak of memory."""

    started_s: float = 0.0
    ended_s: float = 0.0
    token_times_s: dict[int, list[float]] = field(default_factory=dict)
    first_tokens: dict[int, list[int]] = field(default_factory=dict)
    peak_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(times) for times in self.token_times_s.values())

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / (self.ended_s - self.started_s)

    def decode_tokens_per_s(self, skip: int = 8) -> float:
        """Rate while every request decodes: from the ``skip``-th token of the last to start to the end of the first."""
        start = max(times[skip] for times in self.token_times_s.values())
        end = min(times[-1] for times in self.token_times_s.values())
        count = sum(1 for times in self.token_times_s.values() for t in times if start < t <= end)
        return count / (end - start)

    def gaps_s(self, after_s: float = 0.0, until_s: float = float("inf"), requests: Sequence[int] = ()) -> list[float]:
        """Times between consecutive tokens of a request, in order of size."""
        chosen = requests or list(self.token_times_s)
        return sorted(
            b - a
            for i in chosen
            for a, b in zip(self.token_times_s[i], self.token_times_s[i][1:], strict=False)
            if a >= after_s and b <= until_s
        )


def at(sorted_values: Sequence[float], share: float) -> float:
    """A percentile of sorted values."""
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * share))]


class HostTimes:
    """Seconds that the host spends, by part, and how many of them it is busy: the rest it waits, for the GPU say."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.busy_seconds: dict[str, float] = {}
        self.num_steps = 0

    def per_step_ms(self) -> dict[str, str]:
        """Milliseconds per step by part, and the busy share of them."""
        return {
            label: f"{seconds / self.num_steps * 1e3:.2f} ({self.busy_seconds[label] / self.num_steps * 1e3:.2f} busy)"
            for label, seconds in self.seconds.items()
        }

    def wrap(self, owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started, busy = time.perf_counter(), time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - started
                self.busy_seconds[label] = self.busy_seconds.get(label, 0.0) + time.thread_time() - busy

        setattr(owner, name, timed)


def serve(
    runner: ModelRunner,
    works: Sequence[Work],
    *,
    slots: int,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    max_chunk_tokens: int = 512,
    target_stall_s: float = 0.5,
    start: Callable[[int, Run], bool] = lambda i, run: True,
    times: HostTimes | None = None,
    on_scheduler: Callable[[Scheduler], None] = lambda scheduler: None,
) -> Run:
    """``works`` through a real scheduler and core; ``start(i, run)`` says when the i-th may be added."""
    scheduler = Scheduler(
        SchedulerConfig(
            slots=slots,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_chunk_tokens=max_chunk_tokens,
            target_stall_s=target_stall_s,
            max_steps_in_flight=runner.max_steps_in_flight,
            prefix_cache="off",
        )
    )
    on_scheduler(scheduler)
    core = EngineCore(scheduler, runner, time.perf_counter)
    if times is not None:
        times.wrap(scheduler, "schedule", "schedule")
        times.wrap(scheduler, "update", "update")
    run = Run(token_times_s={i: [] for i in range(len(works))}, first_tokens={i: [] for i in range(len(works))})
    mx.reset_peak_memory()
    run.started_s = time.perf_counter()
    next_work = 0
    while next_work < len(works) or core.has_work:
        while next_work < len(works) and start(next_work, run):
            work = works[next_work]
            sampling = SamplingParams(**{**_fields(work.sampling), "max_tokens": work.num_output})
            core.add(EngineRequest(str(next_work), work.prompt, sampling, time.perf_counter()))
            next_work += 1
        outputs = core.step()
        now = time.perf_counter()
        if times is not None:
            times.num_steps += 1
        _take(run, outputs, now)
    run.ended_s = time.perf_counter()
    run.peak_bytes = mx.get_peak_memory()
    return run


def _take(run: Run, outputs: Sequence[TokenOutput], now_s: float) -> None:
    for output in outputs:
        assert output.error is None, output.error
        run.token_times_s[int(output.request_id)] += [now_s] * len(output.token_ids)
        run.first_tokens[int(output.request_id)] += output.token_ids


def _fields(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in SamplingParams.__dataclass_fields__}


def decode_batches(rows: int, context: int, blocks_per_row: int) -> Batches:
    """Steps of ``rows`` rows, by number; the first one's rows have ``context`` positions."""
    tables = [list(range(i * blocks_per_row, (i + 1) * blocks_per_row)) for i in range(rows)]
    known: list[int] = [5] * context

    def batch(step: int) -> StepBatch:
        return StepBatch(
            step,
            tuple(
                BatchRow(str(i), i, context - 1 + step, 1, known, tables[i], 1, GREEDY, 0, True, step)
                for i in range(rows)
            ),
        )

    return batch


def steps_ms(runner: ModelRunner, batches: Batches, first: int, num: int) -> list[float]:
    """Milliseconds between ``num`` steps from number ``first`` on, with one in flight."""
    durations_ms, pending = [], runner.launch(batches(first))
    for step in range(first + 1, first + num):
        started_s = time.perf_counter()
        following = runner.launch(batches(step))
        pending.result()
        pending = following
        durations_ms.append((time.perf_counter() - started_s) * 1e3)
    pending.result()
    return durations_ms


def batch_generator(
    model: Any, works: Sequence[Work], *, slots: int, prefill_batch: int = 8, prefill_step: int = 2048
) -> Run:
    """The same through mlx-lm's BatchGenerator, kept full: a request goes in when a slot is free."""
    generator = BatchGenerator(
        model,
        completion_batch_size=slots,
        prefill_batch_size=prefill_batch,
        prefill_step_size=prefill_step,
        stop_tokens=[],
    )
    run = Run(token_times_s={i: [] for i in range(len(works))}, first_tokens={i: [] for i in range(len(works))})
    mx.reset_peak_memory()
    run.started_s = time.perf_counter()
    place_of: dict[int, int] = {}
    next_work = num_done = 0
    while num_done < len(works):
        while next_work < len(works) and len(place_of) < slots:
            work = works[next_work]
            (uid,) = generator.insert([list(work.prompt)], [work.num_output])
            place_of[uid] = next_work
            next_work += 1
        result = generator.next()
        responses = result[1] if isinstance(result, tuple) else result
        now = time.perf_counter()
        for response in responses:
            run.token_times_s[place_of[response.uid]].append(now)
            if response.finish_reason:
                del place_of[response.uid]
                num_done += 1
    run.ended_s = time.perf_counter()
    run.peak_bytes = mx.get_peak_memory()
    generator.close()
    return run
