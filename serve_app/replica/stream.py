"""Runs the engine's streams of one call and decides when what they brought is sent.

Owns: pumping, the flush interval, and that every engine stream is closed when the call is left, however it is left.
Must not know: Ray, text, or what a message holds.

The first token goes out at once. After it, what comes within the flush interval travels in one message: each message
costs about as much CPU over two hops as decoding several tokens of text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Pump(Generic[T]):
    """Reads several generators at once and keeps what they yield, with their number, until it is taken.

    Leaving it (``async with``) ends the reading and closes every generator.
    """

    def __init__(self, sources: Sequence[AsyncGenerator[T, None]]) -> None:
        self._sources = sources
        self._arrived: list[tuple[int, T]] = []
        self._news = asyncio.Event()
        self._error: BaseException | None = None
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Pump[T]:
        self._tasks = [asyncio.create_task(self._read(number)) for number in range(len(self._sources))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""
        return self._ended.is_set()

    async def wait_for_news(self) -> None:
        """Wait until something has arrived or everything has ended."""
        await self._news.wait()

    async def wait_for_end(self, timeout_s: float) -> None:
        """Wait until everything has ended, ``timeout_s`` at most."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return

    def take(self) -> list[tuple[int, T]]:
        """Return what has arrived. Raises the first error of a source, once what came before it is taken."""
        arrived, self._arrived = self._arrived, []
        if not arrived and self._error is not None:
            raise self._error
        if not self.ended:
            self._news.clear()
        return arrived

    async def _read(self, number: int) -> None:
        source = self._sources[number]
        try:
            async with aclosing(source):
                async for item in source:
                    self._arrived.append((number, item))
                    self._news.set()
        except Exception as error:
            self._error = self._error or error
            self._end()
        if all(task.done() or task is asyncio.current_task() for task in self._tasks):
            self._end()

    def _end(self) -> None:
        self._ended.set()
        self._news.set()


async def batches(
    sources: Sequence[AsyncGenerator[T, None]], flush_interval_s: Callable[[], float]
) -> AsyncGenerator[list[tuple[int, T]], None]:
    """Yield what the sources bring: the first item at once, then what came within each interval, the rest at the end.

    Raises what a source raises, after everything that came before it. Close the generator to close the sources.
    """
    async with Pump(sources) as pump:
        await pump.wait_for_news()
        while arrived := pump.take():
            yield arrived
            if not pump.ended:
                await pump.wait_for_end(flush_interval_s())
            await pump.wait_for_news()
