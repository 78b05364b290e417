"""What a waiting request waits for, accounted without touching every waiting request in every step.

Owns: one clock that says what the queue as a whole waits for, and each request's own account. All requests of the
queue wait for the same thing, that which keeps its head from running; so the clock adds up time per reason once, and a
request takes the difference between entering and leaving. A request that waits for something of its own (its turn to
prefill, another's blocks) keeps its own account. Either way the reasons of a request add up to its wait exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import WaitReason

_REASONS = tuple(WaitReason)


class QueueClock:
    """Seconds per reason for which the head of the queue has been held up."""

    def __init__(self) -> None:
        self.reason = WaitReason.PREFILL_TURN
        self._totals_s = dict.fromkeys(_REASONS, 0.0)
        self._since_s = 0.0

    def set_reason(self, reason: WaitReason, now_s: float) -> None:
        """From now on the queue waits for ``reason``."""
        self._totals_s[self.reason] += now_s - self._since_s
        self.reason = reason
        self._since_s = now_s

    def totals_s(self, now_s: float) -> dict[WaitReason, float]:
        """Seconds per reason up to now."""
        self.set_reason(self.reason, now_s)
        return dict(self._totals_s)


@dataclass(slots=True)
class WaitAccount:
    """One request's waits. At most one of the two is open: with the queue, or for a reason of its own."""

    waited_s: dict[WaitReason, float] = field(default_factory=dict)
    _queue_totals_s: dict[WaitReason, float] | None = None
    _own: tuple[WaitReason, float] | None = None

    @property
    def own_reason(self) -> WaitReason | None:
        """What the request waits for by itself, as one that holds a slot does; None if nothing."""
        return None if self._own is None else self._own[0]

    def start_with_queue(self, clock: QueueClock, now_s: float) -> None:
        """The request is in the queue from now on."""
        self.stop(clock, now_s)
        self._queue_totals_s = clock.totals_s(now_s)

    def start(self, reason: WaitReason, clock: QueueClock, now_s: float) -> None:
        """The request waits for ``reason`` from now on."""
        if self._own is None or self._own[0] is not reason:
            self.stop(clock, now_s)
            self._own = (reason, now_s)

    def stop(self, clock: QueueClock, now_s: float) -> None:
        """The request waits for nothing any more."""
        if self._own is not None:
            reason, since_s = self._own
            self.add(reason, now_s - since_s)
            self._own = None
        elif self._queue_totals_s is not None:
            for reason, total_s in clock.totals_s(now_s).items():
                self.add(reason, total_s - self._queue_totals_s[reason])
            self._queue_totals_s = None

    def add(self, reason: WaitReason, seconds_s: float) -> None:
        """Account for a wait that is over. A negative one (clocks of two processes) counts as none."""
        if seconds_s > 0.0:
            self.waited_s[reason] = self.waited_s.get(reason, 0.0) + seconds_s
