"""The routing policy as Ray Serve's request router.

Owns: what Serve tells a router and asks of it; noticing replicas that are frozen. Must not know: how a choice is made.
Serve makes one router in every process that calls replicas, runs it on one event loop, which nothing here may block,
and pickles this module by value, with whatever of others it holds by name; so what the rest of the process wants to see
goes to ``journal``, which is held as a module.

It is not FIFO (no ``FIFOMixin``): a replica that was chosen for one request must not be given to another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_app.protocol import GenerateCall
from serve_app.routing import journal
from serve_app.routing.cost import SILENT_AFTER_S
from serve_app.routing.keys import place_of, salt_of
from serve_app.routing.policy import RoutingPolicy, RoutingRequest
from serve_app.routing.report import from_stats

PROBE_PERIOD_S = 1.0
PROBE_DEADLINE_S = 2.0
# So many probes in a row without an answer, and the replica's calls are given up.
MAX_PROBES = 3

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watched:
    """A replica as far as watching over it goes. ``left``: the calls that were open there when Serve let go of it."""

    replica: RunningReplica
    sequence: object
    heard_s: float
    num_unanswered: int = 0
    gone: bool = False
    left: set[str] = field(default_factory=set)


class MetalRouter(RequestRouter):
    """One model's router in one process."""

    def initialize_state(self, **kwargs: Any) -> None:
        """``per_user``: whether engines keep each user's cached prompts apart."""
        self._per_user = bool(kwargs.get("per_user"))
        self._policy = RoutingPolicy()
        self._watched: dict[str, _Watched] = {}
        self._sent: dict[tuple[str, str], list[str]] = {}
        self._watch: asyncio.Task[None] | None = None

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve calls this when a replica comes, goes, or has reported."""
        super().update_replicas(replicas)
        now_s = time.monotonic()
        present = {replica.replica_id.unique_id: replica for replica in replicas}
        for name, replica in present.items():
            self._take_report(name, replica, now_s)
        for name in set(self._policy.replicas) - present.keys():
            self._remove(name)
        self._tell_who_is_there()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order of their cost, each a rank of its own."""
        if pending_request is None:
            return [candidate_replicas]
        # Otherwise Serve asks again and again without a pause while every place is taken.
        pending_request.routing_context.should_backoff = True
        call = pending_request.args[0] if pending_request.args else None
        if not isinstance(call, GenerateCall):
            return [candidate_replicas]
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._watch_over_calls())
        request = RoutingRequest(
            call.request_id,
            call.prefix,
            place_of(call.session_key, call.prefix),
            salt_of(call, per_user=self._per_user),
        )
        decision = self._policy.choose(request, time.monotonic())
        if decision is None:
            return [candidate_replicas]
        decision = replace(decision, decided_unix_s=time.time())
        journal.JOURNAL.note(decision)
        # The replica's account of the call tells why it came there.
        pending_request.args = [replace(call, route=decision.route), *pending_request.args[1:]]
        logger.debug("%s", decision.sentence)
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_name[name]] for name in decision.order if name in by_name]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Serve calls this when a replica has taken the request."""
        call = pending_request.args[0] if pending_request.args else None
        if isinstance(call, GenerateCall):
            name = replica_id.unique_id
            self._policy.taken(call.request_id, name, time.monotonic())
            key = (name, pending_request.metadata.internal_request_id)
            # Calls that were made while answering one request share its internal id.
            self._sent.setdefault(key, []).append(call.request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Serve calls this when a request has ended at a replica, in whichever way."""
        key = (replica_id.unique_id, internal_request_id)
        sent = self._sent.get(key)
        if sent:
            request_id = sent.pop(0)
            if not sent:
                del self._sent[key]
            self._policy.came_back(request_id, replica_id.unique_id)
            if (watched := self._watched.get(replica_id.unique_id)) is not None:
                watched.left.discard(request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Serve calls this when it finds a replica dead before its controller does."""
        super().on_replica_actor_died(replica_id)
        self._remove(replica_id.unique_id)
        self._tell_who_is_there()

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Serve calls this when a replica could not be reached."""
        super().on_replica_actor_unavailable(replica_id)
        self._policy.suspect(replica_id.unique_id, time.monotonic())

    def _take_report(self, name: str, replica: RunningReplica, now_s: float) -> None:
        sequence = replica.routing_stats.get("sequence")
        watched = self._watched.get(name)
        if watched is None:
            self._watched[name] = _Watched(replica, sequence, now_s)
        elif watched.sequence == sequence:
            return
        else:
            watched.sequence, watched.heard_s, watched.num_unanswered = sequence, now_s, 0
        self._policy.report(name, replica.node_id, from_stats(replica.routing_stats), now_s)

    def _remove(self, name: str) -> None:
        if (watched := self._watched.get(name)) is not None:
            # A replica that stops in order still answers its calls; one that is frozen never will.
            watched.gone = True
            watched.left.update(self._policy.open_at(name))
        self._policy.remove(name)

    def _tell_who_is_there(self) -> None:
        present = {
            name: journal.Presence(watched.replica.node_id, watched.heard_s)
            for name, watched in self._watched.items()
            if not watched.gone
        }
        journal.JOURNAL.note_present(self._deployment_id.name, present)

    async def _watch_over_calls(self) -> None:
        """Give up calls at replicas that neither report nor answer: a machine that sleeps closes no connection."""
        while True:
            await asyncio.sleep(PROBE_PERIOD_S)
            for name in [name for name, watched in self._watched.items() if watched.gone and not watched.left]:
                del self._watched[name]
            await asyncio.gather(*(self._probe(name) for name in self._watched if self._is_suspect(name)))

    def _open_at(self, name: str) -> set[str]:
        return self._watched[name].left.union(self._policy.open_at(name))

    def _is_suspect(self, name: str) -> bool:
        watched = self._watched[name]
        is_silent = watched.gone or time.monotonic() - watched.heard_s > SILENT_AFTER_S
        return is_silent and bool(self._open_at(name))

    async def _probe(self, name: str) -> None:
        watched = self._watched[name]
        try:
            async with asyncio.timeout(PROBE_DEADLINE_S):
                await watched.replica.get_queue_len(deadline_s=PROBE_DEADLINE_S)
        except Exception:
            watched.num_unanswered += 1
            self._policy.suspect(name, time.monotonic())
        else:
            watched.num_unanswered = 0
            if watched.gone:
                # It took what it took; what it did not take was given to others when Serve let go of it.
                watched.left &= self._taken_by(name)
        if watched.num_unanswered >= MAX_PROBES:
            self._give_up(name)

    def _taken_by(self, name: str) -> set[str]:
        return {request_id for (at, _), sent in self._sent.items() if at == name for request_id in sent}

    def _give_up(self, name: str) -> None:
        request_ids = self._open_at(name)
        logger.warning("replica %s answers no probe: %d calls are given up", name, len(request_ids))
        self._watched[name].left.clear()
        for request_id in request_ids:
            journal.JOURNAL.note_lost(request_id)
