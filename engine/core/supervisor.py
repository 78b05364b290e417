"""Keeps one engine alive: starts it, watches it, restarts it in place, gives up.

Owns: the state of the engine as a whole, the watchdog, the restart policy. Must not know: requests, or whether the
engine is a thread or a process.

After ``MAX_RESTARTS`` restarts without a finished request in between, or when the old engine cannot be got rid of, the
state is DEAD for good and whoever runs the replica has to replace it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from engine.core.messages import Failed, FromEngine, OnProgress, Outputs, Progress, Started, Stopped, ToEngine
from engine.core.transport import Transport
from engine.errors import EngineDeadError, EngineError

MAX_RESTARTS = 2
# Reading tens of gigabytes from a slow disk takes minutes, but not ten of them without a sign of progress.
STARTUP_SILENCE_S = 600.0

logger = logging.getLogger(__name__)


class EngineState(StrEnum):
    """What the engine as a whole is doing. Only RUNNING answers; RESTARTING keeps requests for the next life."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DEAD = "dead"


class EngineClient(Protocol):
    """Who is told what happens. Called on the event loop; must not block."""

    @property
    def waits_for_engine(self) -> bool:
        """Whether any request is open."""
        ...

    def engine_running(self) -> None:
        """A life has begun: send it what is open."""
        ...

    def engine_said(self, outputs: Outputs) -> None:
        """Results."""
        ...

    def engine_lost(self, error: EngineDeadError, *, for_good: bool) -> None:
        """A life has ended."""
        ...


class Supervisor:
    """Lives of one engine, one after another. ``make_transport`` gets the number of the life, from 0."""

    def __init__(self, make_transport: Callable[[int], Transport], client: EngineClient, watchdog_s: float) -> None:
        self._make_transport = make_transport
        self._client = client
        self._watchdog_s = watchdog_s
        self.state = EngineState.STARTING
        self.started: Started | None = None
        self.last_failure: EngineError | None = None
        self.num_lives = 0
        self._num_restarts_in_row = 0
        self._told_to_stop = False
        self._heard_s = 0.0
        self._on_progress: OnProgress = lambda _progress: None
        self._transport: Transport | None = None
        self._first_start: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process of the present life."""
        return self._transport.pid if self._transport is not None else None

    @property
    def heard_age_s(self) -> float:
        """Seconds since the engine said anything, or since it was given something to do."""
        return time.monotonic() - self._heard_s

    @property
    def hears(self) -> bool:
        """Whether there is an engine that takes messages and answers."""
        return self.state in (EngineState.RUNNING, EngineState.STOPPING) and self._transport is not None

    async def start(self, on_progress: OnProgress | None = None) -> None:
        """Begin the first life. Raises the StartupError that ended it, or EngineDeadError."""
        assert self._task is None, "started twice"
        if on_progress is not None:
            self._on_progress = on_progress
        self._first_start = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._supervise(), name="engine-supervisor")
        await self._first_start

    def send(self, message: ToEngine) -> None:
        """Hand ``message`` to the running engine; without one it is dropped."""
        if self.hears:
            assert self._transport is not None
            self._transport.send(message)

    def work_begins(self) -> None:
        """The first open request: from now on silence counts."""
        self._heard_s = time.monotonic()

    def request_finished(self) -> None:
        """A request came to its natural end: the present life is a good one."""
        self._num_restarts_in_row = 0

    async def close(self, grace_s: float) -> None:
        """End the engine in order: ``grace_s`` for what runs, then its teardown, then by force."""
        self._told_to_stop = True
        if self.state not in (EngineState.DEAD, EngineState.STOPPED):
            self.state = EngineState.STOPPING
        self._tell_starter(EngineDeadError("The engine is stopping."))
        if self._transport is not None:
            # One that was given up may still be in the middle of being ended.
            await (self._transport.stop(grace_s) if self.state is EngineState.STOPPING else self._transport.kill())
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.state is EngineState.STOPPING:
            self.state = EngineState.STOPPED

    async def _supervise(self) -> None:
        try:
            await self._live_and_restart()
        except Exception as error:
            logger.exception("the supervisor failed")
            self._lose(EngineDeadError(f"The supervisor failed with {type(error).__name__}: {error}."), for_good=True)

    async def _live_and_restart(self) -> None:
        while True:
            error = await self._live()
            if self._told_to_stop:
                return
            for_good = self.started is None or self._num_restarts_in_row >= MAX_RESTARTS
            self._lose(error, for_good)
            assert self._transport is not None
            gone = await self._transport.kill()
            if for_good or self._told_to_stop:
                return
            if not gone:
                # Two engines on one machine would share its memory: better none.
                self._lose(EngineDeadError(f"{error.message} It cannot be ended."), for_good=True)
                return
            self._num_restarts_in_row += 1

    def _lose(self, error: EngineError, for_good: bool) -> None:
        logger.error("%s %s", error, "Giving up." if for_good else "Restarting.")
        self.last_failure = error
        self.state = EngineState.DEAD if for_good else EngineState.RESTARTING
        self._client.engine_lost(_as_dead(error), for_good=for_good)
        self._tell_starter(error)

    async def _live(self) -> EngineError:
        """One life, from launch to its end; returns why it ended."""
        self._transport = self._make_transport(self.num_lives)
        self.num_lives += 1
        life_ended: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        self.work_begins()

        def end(error: EngineError) -> None:
            if not life_ended.done():
                life_ended.set_result(error)

        def hear(message: FromEngine) -> None:
            if not life_ended.done():
                self._hear(message, end)

        try:
            await self._transport.launch(hear, end)
        except OSError as error:
            return EngineDeadError(f"The engine process cannot be started: {error}.")
        watchdog = asyncio.create_task(self._watch(end), name="engine-watchdog")
        try:
            return await life_ended
        finally:
            watchdog.cancel()

    def _hear(self, message: FromEngine, end: Callable[[EngineError], None]) -> None:
        self._heard_s = time.monotonic()
        match message:
            case Outputs():
                self._client.engine_said(message)
            case Started():
                self.started = message
                if not self._told_to_stop:
                    self.state = EngineState.RUNNING
                    self._client.engine_running()
                self._tell_starter(None)
            case Progress():
                self._report(message)
            case Failed():
                end(message.error)
            case Stopped():
                end(EngineDeadError("The engine has stopped."))

    def _report(self, progress: Progress) -> None:
        try:
            self._on_progress(progress)
        except Exception:
            # Whoever cannot show progress does not stop the model from loading.
            logger.exception("progress could not be reported")

    def _tell_starter(self, error: EngineError | None) -> None:
        if self._first_start is None or self._first_start.done():
            return
        if error is None:
            self._first_start.set_result(None)
        else:
            self._first_start.set_exception(error)

    async def _watch(self, end: Callable[[EngineError], None]) -> None:
        while True:
            limit_s = self._watchdog_s if self.state is EngineState.RUNNING else STARTUP_SILENCE_S
            if self.state is EngineState.RUNNING and not self._client.waits_for_engine:
                silence_left_s = limit_s
            else:
                silence_left_s = limit_s - self.heard_age_s
            if silence_left_s <= 0:
                end(EngineDeadError(f"The engine has made no progress for {limit_s:g} s with work to do."))
                return
            # Never longer than the shorter limit: it may come to hold at any moment.
            await asyncio.sleep(min(silence_left_s, self._watchdog_s))


def _as_dead(error: EngineError) -> EngineDeadError:
    return error if isinstance(error, EngineDeadError) else EngineDeadError(error.message)
