"""What one router knows of its own calls before any replica reports them. Pure.

Owns: the calls this router sent and that have not come back, and how far a replica's last report counts them. Must not
know: costs, prefixes, Ray.

Between two reports a router would otherwise see the same idle replica for every request of a burst. Reports name the
calls that they count (``ReplicaReport.open_tags``), so the difference is exact, however late a report comes: a call of
ours that is not in it is load on top, and one that is in it and has come back since is load that is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.routing.report import tag_of

# A call that was meant for a replica and never confirmed was cancelled on its way.
UNCONFIRMED_FOR_S = 10.0
# A replica that is silent for long must not make this grow.
MAX_COME_BACK = 4096


@dataclass(frozen=True, slots=True)
class Difference:
    """What to add to a replica's last report: requests and the tokens they bring. ``num_requests`` may be negative."""

    num_requests: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class _Open:
    replica: str
    tag: int
    num_tokens: int
    sent_s: float
    confirmed: bool = False


@dataclass(slots=True)
class _Replica:
    tags: frozenset[int] = frozenset()
    come_back: set[int] = field(default_factory=set)
    open: dict[str, _Open] = field(default_factory=dict)


class LocalMap:
    """This router's open calls, by replica."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._open: dict[str, _Open] = {}

    def sent(self, request_id: str, replica: str, num_tokens: int, now_s: float) -> str | None:
        """The call goes to ``replica``, which will have to read ``num_tokens``.

        Returns the replica that it was meant for before, if it was meant for another.
        """
        before = self._open.get(request_id)
        if before is not None:
            del self._replicas[before.replica].open[request_id]
        call = _Open(replica, tag_of(request_id), num_tokens, now_s)
        self._open[request_id] = call
        self._replicas.setdefault(replica, _Replica()).open[request_id] = call
        return before.replica if before is not None and before.replica != replica else None

    def confirm(self, request_id: str) -> None:
        """The replica took the call: it will come back in one way or another."""
        if (call := self._open.get(request_id)) is not None:
            call.confirmed = True

    def came_back(self, request_id: str, replica: str) -> None:
        """The call has ended at ``replica``. Nothing happens when it is open elsewhere by now."""
        call = self._open.get(request_id)
        if call is None or call.replica != replica:
            return
        del self._open[request_id]
        at = self._replicas[replica]
        del at.open[request_id]
        if len(at.come_back) < MAX_COME_BACK:
            at.come_back.add(call.tag)

    def reported(self, replica: str, tags: frozenset[int], now_s: float) -> None:
        """``replica`` counts the calls with these tags."""
        at = self._replicas.setdefault(replica, _Replica())
        at.tags = tags
        at.come_back &= tags
        for request_id in [
            request_id
            for request_id, call in at.open.items()
            if not call.confirmed and call.tag not in tags and now_s - call.sent_s > UNCONFIRMED_FOR_S
        ]:
            del at.open[request_id], self._open[request_id]

    def removed(self, replica: str) -> None:
        """``replica`` is gone, and with it whatever was open there."""
        at = self._replicas.pop(replica, None)
        for request_id in at.open if at is not None else ():
            del self._open[request_id]

    def where(self, request_id: str) -> str | None:
        """Return the replica at which the call is open."""
        call = self._open.get(request_id)
        return call.replica if call is not None else None

    def open_at(self, replica: str) -> tuple[str, ...]:
        """Return the calls that are open at ``replica``."""
        at = self._replicas.get(replica)
        return tuple(at.open) if at is not None else ()

    def difference(self, replica: str) -> Difference:
        """Return what the last report of ``replica`` does not say."""
        at = self._replicas.get(replica)
        if at is None:
            return Difference()
        new = [call for call in at.open.values() if call.tag not in at.tags]
        num_gone = len(at.come_back & at.tags)
        return Difference(len(new) - num_gone, sum(call.num_tokens for call in new))
