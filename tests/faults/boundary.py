"""What the process boundary costs and what it gains, by itself: ``python -m tests.faults.boundary``.

The same engine with a model that needs no weights, once on a thread and once in a process, in alternating runs:

    flat out    steps take no time, so every microsecond that a token costs on the way shows
    paced       steps of ``--step-ms``, as a device would take them; gaps between tokens of a stream at the front
    busy front  paced, while a thread of the front's process holds the interpreter half of the time, as HTTP and Ray do

Prints one JSON line per run and a last one with medians. Ratios between the two are what to look at, never one number.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from tests.core_fakes import ChainRunner, letter_tokenizer, make_core, make_request
from tests.faults.harness import CHAIN_COMMAND

NUM_STREAMS = 16
TOKENIZER = letter_tokenizer()
BUSY_S = 0.005


def make_engine(where: str, step_s: float) -> AsyncEngine:
    """The engine on a thread or in a process."""
    if where == "thread":
        runner_options = {"step_s": step_s, "max_steps_in_flight": 2}
        return AsyncEngine.in_thread(lambda: make_core(ChainRunner(**runner_options), slots=NUM_STREAMS), TOKENIZER)
    command = (*CHAIN_COMMAND, "--step-s", str(step_s))
    return AsyncEngine.in_process(EngineConfig(slots=NUM_STREAMS), TOKENIZER, command=command)


async def stream(engine: AsyncEngine, name: str, num_tokens: int) -> list[float]:
    """Gaps between the tokens of one stream, in seconds."""
    gaps = []
    heard_s: float | None = None
    async for delta in engine.generate(make_request(name, name, num_tokens)):
        now_s = time.perf_counter()
        if heard_s is not None and delta.token_ids:
            gaps.append(now_s - heard_s)
        heard_s = now_s
    return gaps


async def measure(where: str, step_s: float, num_tokens: int, busy: bool) -> dict[str, float]:
    """One run: all streams at once."""
    engine = make_engine(where, step_s)
    await engine.start()
    await stream(engine, "warm", 20)
    front_s, engine_s = cpu_times(engine)
    started_s = time.perf_counter()
    with busy_front() if busy else nothing():
        gaps = await asyncio.gather(*(stream(engine, f"s{i}", num_tokens) for i in range(NUM_STREAMS)))
    elapsed_s = time.perf_counter() - started_s
    front_after_s, engine_after_s = cpu_times(engine)
    await engine.close()
    total = NUM_STREAMS * num_tokens
    ordered = sorted(gap for stream_gaps in gaps for gap in stream_gaps)
    return {
        "tokens_per_s": round(total / elapsed_s),
        "front_cpu_us_per_token": round((front_after_s - front_s) / total * 1e6, 1),
        "engine_cpu_us_per_token": round((engine_after_s - engine_s) / total * 1e6, 1),
        "gap_p50_ms": round(ordered[len(ordered) // 2] * 1e3, 2),
        "gap_p99_ms": round(ordered[len(ordered) * 99 // 100] * 1e3, 2),
    }


def cpu_times(engine: AsyncEngine) -> tuple[float, float]:
    """CPU seconds of the front's process, and of the engine's if it has one."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    front_s = own.ru_utime + own.ru_stime
    assert engine.engine_pid is not None
    times = psutil.Process(engine.engine_pid).cpu_times()
    return front_s, 0.0 if engine.engine_pid == psutil.Process().pid else times.user + times.system


@contextmanager
def busy_front() -> Iterator[None]:
    """A thread that holds the interpreter half of the time."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(BUSY_S):
            until_s = time.perf_counter() + BUSY_S
            while time.perf_counter() < until_s:
                json.loads(json.dumps(list(range(50))))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def nothing() -> Iterator[None]:
    """An idle front."""
    yield


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=20.0)
    arguments = parser.parse_args()
    step_s = arguments.step_ms / 1000
    kinds = {
        "flat out": (0.0, arguments.tokens, False),
        "paced": (step_s, arguments.tokens // 4, False),
        "busy front": (step_s, arguments.tokens // 4, True),
    }
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(arguments.pairs):
        for kind, settings in kinds.items():
            for where in ("thread", "process"):
                found = asyncio.run(measure(where, *settings))
                runs.setdefault((kind, where), []).append(found)
                print(json.dumps({"kind": kind, "where": where, **found}), flush=True)
    print(json.dumps({f"{kind}, {where}": medians(found) for (kind, where), found in runs.items()}))
    return 0


def medians(runs: list[dict[str, float]]) -> dict[str, Any]:
    """The median of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


if __name__ == "__main__":
    sys.exit(main())
