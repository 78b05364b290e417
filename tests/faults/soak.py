"""Random load with random faults for as long as one likes, and an account of it.

``python -m tests.faults.soak --minutes 30`` breaks engine processes with a model that needs no weights (with
``--model demo``: the real one, on MLX) while clients come, go, give up and ask wrongly. At the end every request that
was sent is accounted for, every whole answer was the right one, no block is held, nothing is left over, and neither
process grew. Prints one JSON line; the exit status is 1 if any of that does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import psutil

from engine.config import EngineConfig
from engine.core.async_engine import ENGINE_COMMAND, AsyncEngine
from engine.core.faults import FaultKind, FaultPlan
from engine.core.generation import GenerationRequest
from engine.errors import AdmissionRefusedError, EngineError, RequestCancelledError, RequestError
from engine.model_source import resolve_model
from engine.text.tokenizer import load_tokenizer
from tests.core_fakes import letter_tokenizer, make_request, until
from tests.faults.harness import CHAIN_COMMAND, leftovers, nothing_more_than

NUM_CLIENTS = 12
NUM_PROMPTS = 12
MEAN_PAUSE_S = 0.05
MAX_GROWTH = 0.03
# Younger processes still grow (caches fill, arenas settle), and shorter runs have too little of the rest to compare.
SETTLED_AFTER_S = 15.0
SHORTEST_FOOTPRINT_RUN_S = 120.0
GENTLE = (
    FaultKind.RAISE,
    FaultKind.RAISE_IN_RESULT,
    FaultKind.OUT_OF_MEMORY,
    FaultKind.FAIL_ROW,
    FaultKind.SLOW,
)
DEADLY = (FaultKind.ABORT, FaultKind.KILL, FaultKind.HANG)
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)


@dataclass(frozen=True, slots=True)
class Scale:
    """What differs between the models. ``life_steps``: about how many steps an engine lives before a fault kills it."""

    command: tuple[str, ...]
    config: EngineConfig
    max_tokens: int
    life_steps: int


CHAIN = Scale(CHAIN_COMMAND, EngineConfig(slots=4, watchdog_s=1.0, max_waiting_requests=12), 60, 8000)
DEMO = Scale(
    ENGINE_COMMAND,
    EngineConfig(slots=4, max_model_len=512, watchdog_s=20.0, max_waiting_requests=6, parity="off"),
    24,
    1500,
)


@dataclass(slots=True)
class Account:
    """What became of what was sent."""

    num_sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_lives: int = 0
    num_replaced: int = 0
    footprints: dict[str, list[int]] = field(default_factory=lambda: {"front": [], "engine": []})


class Soak:
    """One run. ``life_steps`` overrides the scale's."""

    def __init__(self, scale: Scale, duration_s: float, seed: int, life_steps: int | None = None) -> None:
        self.account = Account()
        self._scale = scale
        self._life_steps = life_steps or scale.life_steps
        self._duration_s = duration_s
        self._random = random.Random(seed)
        self._tokenizer = letter_tokenizer() if scale is CHAIN else load_tokenizer(resolve_model(scale.config.model))
        self._answers: dict[str, tuple[int, ...]] = {}
        self._ended = asyncio.Event()
        self._replacing = asyncio.Lock()

    async def run(self) -> dict[str, Any]:
        """Learn the right answers in calm, then load and break; returns the findings."""
        before = leftovers()
        self._engine = self._make_engine(faulty=False)
        await self._engine.start()
        for number in range(NUM_PROMPTS):
            prompt = f"Tell me about the number {number}. " * (1 + number % 4)
            self._answers[prompt] = await self._ask(self._request(prompt, self._scale.max_tokens))
        await self._replace()
        tasks = [asyncio.create_task(work()) for work in (*[self._client] * NUM_CLIENTS, self._saboteur, self._watcher)]
        await asyncio.sleep(self._duration_s)
        self._ended.set()
        await asyncio.gather(*tasks)
        held = await self._held_blocks()
        await self._engine.close()
        self.account.num_lives += self._engine.num_restarts + 1
        await nothing_more_than(before)
        return self._findings(held)

    def _make_engine(self, *, faulty: bool) -> AsyncEngine:
        lives = [self._faults() for _ in range(200)] if faulty else []
        scale = self._scale
        return AsyncEngine.in_process(
            scale.config, self._tokenizer, command=scale.command, faults=lives, teardown_s=2.0
        )

    def _faults(self) -> list[FaultPlan]:
        life = self._life_steps
        gentle = [
            FaultPlan(self._random.choice(GENTLE), self._random.randrange(life), slow_s=0.3)
            for _ in range(max(2, life // 1000))
        ]
        deadly = FaultPlan(self._random.choice(DEADLY), self._random.randrange(life // 2, life))
        return [*gentle, deadly]

    async def _replace(self) -> None:
        """What Ray Serve does with a replica that is unhealthy for good."""
        await self._engine.close()
        self.account.num_lives += self._engine.num_restarts + 1
        self._engine = self._make_engine(faulty=True)
        await self._engine.start()

    def _request(self, prompt: str, max_tokens: int, **more: Any) -> GenerationRequest:
        name = f"r{self.account.num_sent}-{self._random.getrandbits(32):x}"
        request = make_request(name, "x", max_tokens, **more)
        return dataclasses.replace(request, prompt_token_ids=tuple(self._tokenizer.encode(prompt)))

    async def _ask(self, request: GenerationRequest, leave_after: int | None = None) -> tuple[int, ...]:
        token_ids: tuple[int, ...] = ()
        async with aclosing(self._engine.generate(request)) as stream:
            num_deltas = 0
            async for delta in stream:
                num_deltas += 1
                token_ids += delta.token_ids if delta.index == 0 else ()
                if num_deltas == leave_after:
                    raise _LeftError
        return token_ids

    async def _client(self) -> None:
        while not await self._ends_within(self._random.expovariate(1 / MEAN_PAUSE_S)):
            prompt = self._random.choice(list(self._answers))
            max_tokens = self._random.randint(1, self._scale.max_tokens)
            request, leave_after = self._wish(prompt, max_tokens)
            self.account.num_sent += 1
            try:
                got = await self._ask(request, leave_after)
            except _LeftError:
                self.account.outcomes["left"] += 1
            except (EngineError, AssertionError) as error:
                self._note(error)
                await self._replace_if_dead()
            else:
                self.account.outcomes["finished"] += 1
                if got != self._answers[prompt][:max_tokens]:
                    self.account.wrong.append(request.request_id)

    def _wish(self, prompt: str, max_tokens: int) -> tuple[GenerationRequest, int | None]:
        kind = self._random.random()
        if kind < 0.70:
            return self._request(prompt, max_tokens), None
        if kind < 0.80:
            return self._request(prompt, max_tokens, n=2), None
        if kind < 0.90:
            return self._request(prompt, self._scale.max_tokens), self._random.randint(1, 5)
        if kind < 0.95:
            return self._request(prompt, max_tokens, deadline_s=time.monotonic() + self._random.random()), None
        return self._request(prompt, max_tokens, top_k=-1), None

    def _note(self, error: Exception) -> None:
        match error:
            case RequestError() | AdmissionRefusedError():
                outcome = "refused"
            case RequestCancelledError():
                outcome = "cancelled"
            case _:
                outcome = "failed"
        self.account.outcomes[outcome] += 1
        self.account.reasons[type(error).__name__] += 1

    async def _replace_if_dead(self) -> None:
        async with self._replacing:
            if not self._engine.healthy and not self._ended.is_set():
                self.account.num_replaced += 1
                await self._replace()

    async def _saboteur(self) -> None:
        """Signals from outside, about as often as the planned deaths."""
        while not await self._ends_within(self._random.uniform(0.5, 1.5) * self._duration_s / 8):
            if self._engine.ready and self._engine.engine_pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._engine.engine_pid, self._random.choice(SIGNALS))

    async def _watcher(self) -> None:
        """Footprints, of processes that have settled."""
        front = psutil.Process()
        while not await self._ends_within(0.5):
            for name, pid in (("front", front.pid), ("engine", self._engine.engine_pid)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    if time.time() - process.create_time() > SETTLED_AFTER_S and self._engine.ready:
                        self.account.footprints[name].append(process.memory_info().rss)

    async def _ends_within(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        return self._ended.is_set()

    async def _held_blocks(self) -> int:
        """Blocks that are neither free nor cached although nothing runs."""
        if not self._engine.ready:
            return 0

        def idle() -> bool:
            stats = self._engine.status().scheduler
            return not self._engine.ready or stats.num_running == stats.num_waiting == 0

        await until(self._engine, idle)
        stats = self._engine.status().scheduler
        return stats.num_blocks_total - stats.num_blocks_free - stats.num_blocks_cached

    def _findings(self, num_held_blocks: int) -> dict[str, Any]:
        account = self.account
        growth = {name: _growth(samples) for name, samples in account.footprints.items()}
        judged = self._duration_s >= SHORTEST_FOOTPRINT_RUN_S
        return {
            "sent": account.num_sent,
            **account.outcomes,
            "reasons": dict(account.reasons),
            "lives": account.num_lives,
            "replaced": account.num_replaced,
            "unaccounted": account.num_sent - account.outcomes.total(),
            "wrong": account.wrong,
            "held_blocks": num_held_blocks,
            "growth": growth,
            "ok": not account.wrong
            and account.num_sent == account.outcomes.total()
            and num_held_blocks == 0
            and account.outcomes["finished"] > 0
            and not (judged and any(part is not None and part > MAX_GROWTH for part in growth.values())),
        }


class _LeftError(Exception):
    """The client went away in the middle."""


def _growth(samples: list[int]) -> float | None:
    """The last third's median over the first third's, less one; None with too little to compare."""
    third = len(samples) // 3
    if third < 10:
        return None
    return round(statistics.median(samples[-third:]) / statistics.median(samples[:third]) - 1, 4)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", choices=("chain", "demo"), default="chain")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", file=sys.stderr)

    async def run() -> dict[str, Any]:
        scale = {"chain": CHAIN, "demo": DEMO}[arguments.model]
        return await Soak(scale, arguments.minutes * 60, arguments.seed).run()

    findings = asyncio.run(run())
    print(json.dumps(findings))
    return 0 if findings["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
