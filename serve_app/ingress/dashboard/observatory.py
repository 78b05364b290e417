"""Looks at the fleet once a second while anybody watches, and gives everybody the same picture.

Owns: when to look, who watches, and replicas that were there a moment ago. Must not know: HTTP, what is in a picture.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

from serve_app.ingress.dashboard.state import Json, Seen, compose
from serve_app.ingress.fleet import Fleet
from serve_app.ingress.observing import IngressWatch
from serve_app.routing.journal import JOURNAL
from serve_app.telemetry.observer import ReplicaView

PERIOD_S = 1.0
# A replica that stopped answering is shown as silent for so long.
REMEMBERED_S = 120.0
NUM_DECISIONS = 20

logger = logging.getLogger(__name__)


class Observatory:
    """One ingress's view of the fleet."""

    def __init__(self, fleet: Fleet, watch: IngressWatch, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._watch = watch
        self._clock = clock
        self._last: dict[str, tuple[float, ReplicaView]] = {}
        self._num_watching = 0
        self._looking: asyncio.Task[None] | None = None
        self._picture: Json | None = None
        self._news = asyncio.Condition()

    async def watch(self) -> AsyncIterator[Json]:
        """Yield a picture at once, and each new one."""
        self._num_watching += 1
        try:
            yield await self.look()
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._keep_looking(), name="dashboard")
            while True:
                async with self._news:
                    await self._news.wait()
                    picture = self._picture
                if picture is not None:
                    yield picture
        finally:
            self._num_watching -= 1

    async def look(self) -> Json:
        """Return a picture of this moment."""
        views, scaling, ingresses = await asyncio.gather(
            self._fleet.views(), self._fleet.scaling(), self._fleet.ingress_views()
        )
        now_s = self._clock()
        answering = {view.status.replica_id: (now_s, view) for view in views if not view.status.silent_s}
        silent = {view.status.replica_id: view for view in views if view.status.silent_s}
        self._last.update(answering)
        for name, view in silent.items():
            # What it showed when it answered is worth more than that it does not.
            self._last.setdefault(name, (now_s - view.status.silent_s, view))
        self._last = {
            name: (at_s, view)
            for name, (at_s, view) in self._last.items()
            if now_s - at_s <= REMEMBERED_S or name in silent
        }
        seen = [Seen(view, 0.0 if name in answering else now_s - at_s) for name, (at_s, view) in self._last.items()]
        models = [model.name for model in self._fleet.models]
        decisions = JOURNAL.newest(NUM_DECISIONS)
        return compose(models, seen, scaling, decisions, time.time(), ingresses or [self._watch.view()])

    async def _keep_looking(self) -> None:
        while self._num_watching:
            await asyncio.sleep(PERIOD_S)
            try:
                self._picture = await self.look()
            except Exception:
                # The next look may well succeed; who watches sees that the picture is old.
                logger.exception("the fleet could not be looked at")
                continue
            async with self._news:
                self._news.notify_all()
