"""Something is said to every replica now and then, so that none has become hard to reach when a request comes.

Owns: when. Must not know: what is said. After a day without requests the first ones of others' fleets of Macs timed out
(Ray issue 59327): connections that carry nothing are dropped on the way, and nobody notices before they are needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Heartbeat:
    """Calls ``say`` once in ``period_s``, in the background. Belongs to one event loop."""

    def __init__(self, say: Callable[[], Awaitable[object]], period_s: float) -> None:
        self._say = say
        self._period_s = period_s
        self._next_s = 0.0
        self._saying: asyncio.Future[object] | None = None

    def beat(self, now_s: float) -> None:
        """It is ``now_s``. Does not wait; one that is not over yet is not joined by another."""
        if now_s < self._next_s or (self._saying is not None and not self._saying.done()):
            return
        self._next_s = now_s + self._period_s
        self._saying = asyncio.ensure_future(self._say())
