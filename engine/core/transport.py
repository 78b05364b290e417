"""How the front reaches the loop: the seam, and the loop on a thread of this process.

Owns: starting and ending one life of an engine. A transport serves one life; a restart makes a new one. Must not know:
requests, restart policy.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Protocol

from engine.core.engine_core import EngineCore
from engine.core.engine_loop import EngineLoop
from engine.core.messages import FromEngine, OnProgress, Shutdown, ToEngine
from engine.errors import EngineDeadError

OnMessage = Callable[[FromEngine], None]
OnEnded = Callable[[EngineDeadError], None]


class Transport(Protocol):
    """One life of an engine. All methods and callbacks belong to the event loop that called ``launch``."""

    @property
    def pid(self) -> int | None:
        """The process that the engine runs in."""
        ...

    async def launch(self, on_message: OnMessage, on_ended: OnEnded) -> None:
        """Start the engine. ``on_ended`` is called once, after the last message, when nothing more can come."""
        ...

    def send(self, message: ToEngine) -> None:
        """Hand over ``message`` without waiting; after the end it goes nowhere."""
        ...

    async def stop(self, grace_s: float) -> bool:
        """End in order, ``grace_s`` for what runs, then teardown; by force if that fails. Return whether it is gone."""
        ...

    async def kill(self) -> bool:
        """End it now, whatever state it is in. Returns whether it is gone."""
        ...


class ThreadTransport:
    """The loop on a thread. A thread cannot be ended from outside: one that hangs stays, and ``stop`` returns False.

    ``teardown_s`` is how long freeing the model may take.
    """

    def __init__(self, build: Callable[[OnProgress], EngineCore], teardown_s: float) -> None:
        self._build = build
        self._teardown_s = teardown_s
        self._engine: EngineLoop | None = None
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """This process."""
        return os.getpid()

    async def launch(self, on_message: OnMessage, on_ended: OnEnded) -> None:
        """Start the thread."""
        event_loop = asyncio.get_running_loop()

        def call(callback: Callable[..., None], *arguments: object) -> None:
            if not event_loop.is_closed():
                event_loop.call_soon_threadsafe(callback, *arguments)

        def run() -> None:
            engine.run()
            call(self._ended.set)
            call(on_ended, EngineDeadError("The engine thread has ended."))

        engine = self._engine = EngineLoop(self._build, lambda message: call(on_message, message))
        threading.Thread(target=run, name="engine-loop", daemon=True).start()

    def send(self, message: ToEngine) -> None:
        """Leave ``message`` in the loop's inbox."""
        if self._engine is not None:
            self._engine.post(message)

    async def stop(self, grace_s: float) -> bool:
        """Ask the loop to end and wait for it."""
        self.send(Shutdown(grace_s))
        try:
            await asyncio.wait_for(self._ended.wait(), grace_s + self._teardown_s)
        except TimeoutError:
            return False
        return True

    async def kill(self) -> bool:
        """The same as ``stop`` without grace: there is no force to use on a thread."""
        return await self.stop(0.0)
