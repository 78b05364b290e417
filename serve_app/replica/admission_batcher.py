"""Gathers calls that arrive while the replica is busy, so that they share one tokenizer call and enter together.

Owns: when a wave begins and who is in it. Must not know: how prompts are made (prompts.py), Ray, HTTP. Belongs to the
replica's event loop.

Nothing is gathered for its own sake: a call that finds a free slot and a free thread goes at once. Calls are gathered
while every thread is at work, and for ``WAVE_S`` while the engine has no slot to give, where they would wait anyway.
``@serve.batch`` always waits for its timeout and lives in an actor only, so this is a queue and a timer instead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

C = TypeVar("C")
P = TypeVar("P")

WAVE_S = 0.005
# A wave takes as long as all its text: a long document goes alone, so that no question waits for it.
MAX_WAVE_BYTES = 64 * 1024
MAX_WAVE_CALLS = 64


class AdmissionBatcher(Generic[C, P]):
    """Prepares calls in waves on ``num_threads`` threads.

    ``prepare`` is called on a thread with a wave and returns, in order, what each call becomes or the error it ends
    with. ``size_of``: bytes of text. ``is_full``: whether a newcomer would wait for a slot.
    """

    def __init__(
        self,
        prepare: Callable[[Sequence[C]], Sequence[P | Exception]],
        *,
        size_of: Callable[[C], int],
        is_full: Callable[[], bool],
        num_threads: int,
    ) -> None:
        self._prepare = prepare
        self._size_of = size_of
        self._is_full = is_full
        self._num_idle_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._arrived: deque[tuple[C, asyncio.Future[P]]] = deque()
        self._gathering: asyncio.TimerHandle | None = None
        self._waves: set[asyncio.Task[None]] = set()
        self.num_waves = 0

    async def prepare(self, call: C) -> P:
        """Return what ``call`` becomes, or raise what it ends with."""
        loop = asyncio.get_running_loop()
        prepared: asyncio.Future[P] = loop.create_future()
        self._arrived.append((call, prepared))
        if not self._is_full():
            self._begin_waves()
        elif self._gathering is None:
            self._gathering = loop.call_later(WAVE_S, self._begin_waves)
        return await prepared

    def close(self) -> None:
        """Let go of the threads."""
        if self._gathering is not None:
            self._gathering.cancel()
        self._threads.shutdown(wait=False)

    def _begin_waves(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        while self._num_idle_threads and (wave := self._take_wave()):
            self._num_idle_threads -= 1
            self.num_waves += 1
            task = asyncio.create_task(self._run(wave))
            self._waves.add(task)
            task.add_done_callback(self._waves.discard)

    def _take_wave(self) -> list[tuple[C, asyncio.Future[P]]]:
        wave: list[tuple[C, asyncio.Future[P]]] = []
        num_bytes = 0
        while self._arrived and len(wave) < MAX_WAVE_CALLS:
            call, prepared = self._arrived[0]
            if not prepared.done():
                num_bytes += self._size_of(call)
                if wave and num_bytes > MAX_WAVE_BYTES:
                    break
                wave.append((call, prepared))
            self._arrived.popleft()
        return wave

    async def _run(self, wave: Sequence[tuple[C, asyncio.Future[P]]]) -> None:
        results: Sequence[P | Exception]
        try:
            calls = [call for call, _ in wave]
            results = await asyncio.get_running_loop().run_in_executor(self._threads, self._prepare, calls)
        except Exception as error:
            results = [error] * len(wave)
        self._num_idle_threads += 1
        for (_, prepared), result in zip(wave, results, strict=True):
            if prepared.done():
                continue
            if isinstance(result, Exception):
                prepared.set_exception(result)
            else:
                prepared.set_result(result)
        self._begin_waves()
