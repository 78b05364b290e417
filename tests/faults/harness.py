"""Engines in processes of their own, a load of requests on them, and a look at what is left afterwards."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from engine.core.faults import FaultPlan
from engine.core.generation import GenerationRequest
from engine.errors import EngineError
from tests.core_fakes import answer_text, letter_tokenizer, make_request

CHAIN_COMMAND = (sys.executable, "-P", "-m", "tests.faults.chain_process")
TOKENIZER = letter_tokenizer()
WATCHDOG_S = 1.0
TEARDOWN_S = 1.0
LEFTOVERS_S = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended. ``silent_s``: from its last token, or from its submission, to its end."""

    request: GenerationRequest
    text: str
    error: EngineError | None
    silent_s: float

    @property
    def is_right(self) -> bool:
        """Whether the whole answer came, and the right one."""
        expected = answer_text(self.request.prompt_token_ids, self.request.sampling.max_tokens)
        return self.error is None and self.text == expected


def chain_engine(faults: Sequence[Sequence[FaultPlan]] = (), **config: object) -> AsyncEngine:
    """An engine process with the chain model, not started yet."""
    settings = EngineConfig.model_validate({"slots": 4, "watchdog_s": WATCHDOG_S, **config})
    return AsyncEngine.in_process(settings, TOKENIZER, command=CHAIN_COMMAND, faults=faults, teardown_s=TEARDOWN_S)


@asynccontextmanager
async def running(faults: Sequence[Sequence[FaultPlan]] = (), **config: object) -> AsyncIterator[AsyncEngine]:
    """A started engine; afterwards it must have left nothing behind."""
    before = leftovers()
    engine = chain_engine(faults, **config)
    try:
        await engine.start()
        yield engine
        assert engine.engine_pid is not None
        assert not shared_memory_of(engine.engine_pid), "a segment could be left behind"
    finally:
        await engine.close()
    await nothing_more_than(before)


async def ask(engine: AsyncEngine, request: GenerationRequest) -> Outcome:
    """Send one request and wait for its end."""
    text = ""
    heard_s = time.monotonic()
    try:
        async with aclosing(engine.generate(request)) as stream:
            async for delta in stream:
                text += delta.text
                heard_s = time.monotonic()
    except EngineError as error:
        return Outcome(request, text, error, time.monotonic() - heard_s)
    return Outcome(request, text, None, time.monotonic() - heard_s)


async def ask_many(engine: AsyncEngine, num_requests: int, num_tokens: int = 40) -> list[Outcome]:
    """``num_requests`` at once, each with a prompt of its own."""
    requests = [make_request(f"r{i}", f"prompt {i} " * (i + 1), num_tokens) for i in range(num_requests)]
    return await asyncio.gather(*(ask(engine, request) for request in requests))


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What this process could be left with."""

    num_descriptors: int
    children: frozenset[int]


def leftovers() -> Leftovers:
    """What there is now."""
    me = psutil.Process()
    return Leftovers(me.num_fds(), frozenset(child.pid for child in me.children(recursive=True)))


async def nothing_more_than(before: Leftovers) -> None:
    """Wait until no more is left than ``before``; fails after some seconds."""

    def no_more() -> bool:
        after = leftovers()
        return after.num_descriptors <= before.num_descriptors and after.children <= before.children

    await poll(no_more, timeout_s=LEFTOVERS_S, what=f"{leftovers()} instead of {before}")


def shared_memory_of(pid: int) -> list[str]:
    """Shared memory segments that a process has mapped; none where the system does not tell."""
    try:
        mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []
    return [line for line in mapped if "/dev/shm/" in line or "/SYSV" in line]


async def poll(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait for something that sends no event: the end of a process that is not a child, a count of descriptors."""
    give_up_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.02)
