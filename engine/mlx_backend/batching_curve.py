"""Measures what decoding more rows at a time gains on this machine, and keeps it as the machine's profile.

Owns: the measurement on the served runner, the file. Must not know: what is done with the figures (memory/slots.py).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from engine.batch import BatchRow, StepBatch
from engine.interfaces import ModelRunner
from engine.request import SamplingParams

SCHEMA = "metalslots.gains/1"
_CONTEXT_TOKENS = 128
_LEAST_STEPS, _MOST_STEPS = 3, 20
_LEAST_TIME_S = 0.3
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def num_blocks_needed(most_rows: int, block_size: int) -> int:
    """Blocks that ``measure_step_times`` uses."""
    return most_rows * _blocks_per_row(block_size)


def measure_step_times(
    runner: ModelRunner,
    most_rows: int,
    block_size: int,
    time_limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Seconds per decode step with 1 to ``most_rows`` rows of 128 tokens' context, as many as the time allows.

    What the pool holds does not matter for the time, so no prompt is read.
    """
    started_s, times_s = clock(), {}
    for num_rows in range(1, most_rows + 1):
        if clock() - started_s > time_limit_s:
            break
        times_s[num_rows] = _step_time_s(runner, num_rows, block_size, clock)
    return times_s


def gains_of(times_s: Mapping[int, float]) -> dict[int, float]:
    """g(k): tokens per second of k rows over those of one."""
    return {rows: rows * times_s[1] / time_s for rows, time_s in times_s.items()}


def profile_path(model: str) -> Path:
    """Where the profile of ``model`` lies in the person's state folder."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "metalslots" / "profiles" / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', model)}.json"


def save_profile(path: Path, *, model: str, machine: str, times_s: Mapping[int, float]) -> None:
    """Write the file that ``profile:`` in an engine's configuration names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "schema": SCHEMA,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "model": model,
        "gains": {str(rows): round(gain, 3) for rows, gain in gains_of(times_s).items()},
        "step_times_s": {str(rows): round(time_s, 6) for rows, time_s in times_s.items()},
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _blocks_per_row(block_size: int) -> int:
    return -(-(_CONTEXT_TOKENS + _MOST_STEPS + 3) // block_size)


def _step_time_s(runner: ModelRunner, num_rows: int, block_size: int, clock: Callable[[], float]) -> float:
    """The runner is kept as full as it is when it serves; the first step is not counted."""
    per_row = _blocks_per_row(block_size)
    tokens = [1] * _CONTEXT_TOKENS
    tables = [list(range(row * per_row, (row + 1) * per_row)) for row in range(num_rows)]

    def launch(step: int) -> StepBatch:
        start = _CONTEXT_TOKENS - 1 + step
        known = tokens if runner.max_steps_in_flight > 1 else [*tokens, *[1] * step]
        return StepBatch(
            step,
            tuple(
                BatchRow(
                    request_id=str(row),
                    slot=row,
                    start=start,
                    num_tokens=1,
                    token_ids=known,
                    block_ids=tables[row],
                    num_prompt_tokens=1,
                    sampling=_GREEDY,
                    seed=0,
                    samples=True,
                    output_index=step,
                )
                for row in range(num_rows)
            ),
        )

    runner.launch(launch(0)).result()
    started_s, pending, num_steps = clock(), [runner.launch(launch(1))], 1
    while num_steps < _LEAST_STEPS or (clock() - started_s < _LEAST_TIME_S and num_steps < _MOST_STEPS):
        if len(pending) == runner.max_steps_in_flight:
            pending.pop(0).result()
        num_steps += 1
        pending.append(runner.launch(launch(num_steps)))
    for step in pending:
        step.result()
    runner.release([str(row) for row in range(num_rows)])
    return (clock() - started_s) / num_steps
