"""What this process's routers decided, where the rest of the process can read it.

Owns: one journal for the process, safe to use from every thread. Must not know: how decisions are made. Serve runs
routers on a thread of their own and makes them itself, so there is no object that both sides could be given.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from serve_app.routing.decision import Decision, DecisionLog

NUM_LOST_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Presence:
    """A replica that Serve counts among the running ones. ``heard_s``: its newest report, in monotonic seconds."""

    node_id: str
    heard_s: float


class Journal:
    """Decisions by request, the requests whose replica no longer answers anybody, and which replicas there are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decisions = DecisionLog()
        self._lost: OrderedDict[str, None] = OrderedDict()
        self._cancels: dict[str, Callable[[], None]] = {}
        self._present: dict[str, Mapping[str, Presence]] = {}

    def note(self, decision: Decision) -> None:
        """Keep ``decision``."""
        with self._lock:
            self._decisions.add(decision)

    def decision_on(self, request_id: str) -> Decision | None:
        """Return the last decision on a request of this process."""
        with self._lock:
            return self._decisions.get(request_id)

    def newest(self, num: int) -> tuple[Decision, ...]:
        """Return the last decisions, newest first."""
        with self._lock:
            return self._decisions.newest(num)

    def watch(self, request_id: str, cancel: Callable[[], None]) -> None:
        """Call ``cancel``, from any thread, when the request is given up."""
        with self._lock:
            self._cancels[request_id] = cancel

    def unwatch(self, request_id: str) -> None:
        """The request has ended."""
        with self._lock:
            self._cancels.pop(request_id, None)

    def note_lost(self, request_id: str) -> None:
        """The request is given up by its router: its replica is silent, and answers no probe."""
        with self._lock:
            cancel = self._cancels.pop(request_id, None)
            if cancel is None:
                return
            self._lost[request_id] = None
            if len(self._lost) > NUM_LOST_KEPT:
                self._lost.popitem(last=False)
        cancel()

    def take_lost(self, request_id: str) -> bool:
        """Return whether the request was given up since the last time this was asked."""
        with self._lock:
            is_lost = request_id in self._lost
            self._lost.pop(request_id, None)
            return is_lost

    def note_present(self, deployment: str, replicas: Mapping[str, Presence]) -> None:
        """These are the replicas of ``deployment``, by name."""
        with self._lock:
            self._present[deployment] = replicas

    def present(self, deployment: str) -> Mapping[str, Presence]:
        """Return the replicas of ``deployment``; none before this process has asked any of them anything."""
        with self._lock:
            return self._present.get(deployment, {})


JOURNAL = Journal()
