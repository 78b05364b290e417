"""Chooses a replica for a request: the one where it costs the person least. Pure.

Owns: the choice and its record, and what one router knows of the fleet. Must not know: Ray, clocks, threads.

    cost      = wait for a slot + prefill turn + reading what is not cached + answer beside others + silence  (cost.py)
    cached    = the longest beginning of the prompt that the replica reported, or that was just sent there
    equal     = within a tenth of the least cost; of equals the one that has most of the prompt, and of those the one
                that rendezvous hashing by node gives, the same in every router
    last      = draining, not ready, lately unreachable, or has failed this very request before; such a one is chosen
                only when nothing else is left, and refuses by itself if it must

A cache is worth what reading again would take, never more: a replica where waiting costs more than that loses the
conversation to another, so no prompt, however popular, piles up on one machine.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from serve_app.protocol import PrefixChain
from serve_app.routing.cost import Costs, Floats, costs_of
from serve_app.routing.decision import Candidate, Decision, Reason
from serve_app.routing.keys import salted
from serve_app.routing.local_map import LocalMap
from serve_app.routing.prefix_index import PrefixIndex
from serve_app.routing.rendezvous import weights
from serve_app.routing.report import ReplicaReport
from serve_app.routing.table import ReplicaTable

EQUAL_SHARE = 0.1
EQUAL_S = 0.05
# In a large fleet a request has so many candidates: those that rendezvous hashing gives it, and those that hold most of
# its prompt. Reports are a second old; if every router took the least loaded of all, all of them would take the same.
NUM_CANDIDATES = 8
NUM_HOLDERS = 4
OUTSIDER_S = 10.0
NUM_RANKED = 16
NUM_ALTERNATIVES = 3
NUM_TRIES_KEPT = 4096
SUSPECT_FOR_S = 10.0
# Larger than any cost: whoever has it comes after everybody who has not.
_LAST_S = 1e6


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What the policy needs of a request. ``place``: from ``keys.place_of``. ``salt``: of a per-user prefix cache."""

    request_id: str
    prefix: PrefixChain
    place: int
    salt: str = ""


class RoutingPolicy:
    """One router's view of one model's replicas, and its choices. Belongs to one thread."""

    def __init__(self) -> None:
        self._table = ReplicaTable()
        self._index = PrefixIndex()
        self._local = LocalMap()
        self._tried: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    @property
    def replicas(self) -> tuple[str, ...]:
        """The known replicas."""
        return tuple(self._table)

    def report(self, replica: str, node_id: str, report: ReplicaReport | None, now_s: float) -> None:
        """``replica`` is there, and has said ``report`` last."""
        if replica not in self._table:
            self._table.add(replica, node_id, now_s)
        if report is not None and self._table.report(replica, report, now_s):
            self._index.report(self._table.row_of(replica), report.prefixes, now_s)
            self._local.reported(replica, report.open_tags, now_s)
            self._correct(replica)

    def remove(self, replica: str) -> None:
        """``replica`` is gone."""
        if replica in self._table:
            self._index.remove(self._table.remove(replica))
            self._local.removed(replica)

    def suspect(self, replica: str, now_s: float) -> None:
        """``replica`` did not answer when it was called. It may all the same: a network has hiccups."""
        if replica in self._table:
            self._table.columns.suspect_until_s[self._table.row_of(replica)] = now_s + SUSPECT_FOR_S

    def open_at(self, replica: str) -> tuple[str, ...]:
        """Return this router's calls that are open at ``replica``."""
        return self._local.open_at(replica)

    def choose(self, request: RoutingRequest, now_s: float) -> Decision | None:
        """Choose, and count the request where it will be sent. None when there is no replica at all."""
        if not len(self._table):
            return None
        names = salted(request.prefix.hashes, request.salt)
        cached = self._index.num_cached_tokens(names, request.prefix.num_tokens, self._table.num_rows)
        costs = costs_of(self._table.load(now_s), request.prefix.num_prompt_tokens, cached)
        ranking = costs.total_s + self._penalties(request, cached, now_s)
        best = self._best(ranking, cached, request.place)
        decision = self._record(request, ranking, best, costs, cached)
        self._note_choice(request, decision, names, now_s)
        return decision

    def taken(self, request_id: str, replica: str, now_s: float) -> None:
        """``replica`` took the request; it is not always the one that was chosen."""
        if self._local.where(request_id) != replica and replica in self._table:
            self._move(request_id, replica, 0, now_s)
        self._local.confirm(request_id)
        tried = self._tried.get(request_id, ())
        if tried and tried[-1] != replica:
            self._tried[request_id] = (*tried[:-1], replica)

    def came_back(self, request_id: str, replica: str) -> None:
        """The request has ended at ``replica``, in whichever way."""
        self._local.came_back(request_id, replica)
        if replica in self._table:
            self._correct(replica)

    def _penalties(self, request: RoutingRequest, cached: Floats, now_s: float) -> Floats:
        """Seconds that put rows behind others for what they are, and not for what they cost."""
        n, columns = self._table.num_rows, self._table.columns
        is_last = columns.draining[:n] | ~columns.usable[:n] | (columns.suspect_until_s[:n] > now_s)
        if self._local.where(request.request_id) is None:
            for replica in self._tried.get(request.request_id, ()):
                if replica in self._table:
                    is_last[self._table.row_of(replica)] = True
        penalties_s = np.where(is_last, _LAST_S, 0.0)
        if len(self._table) > NUM_CANDIDATES:
            self._prefer_candidates(penalties_s, request.place, cached)
        penalties_s[~columns.exists[:n]] = np.inf
        return penalties_s

    def _prefer_candidates(self, penalties_s: Floats, place: int, cached: Floats) -> None:
        n, columns = self._table.num_rows, self._table.columns
        can_be = columns.exists[:n] & (penalties_s == 0.0)
        wanted = np.where(can_be, weights(columns.nodes[:n], place) * 2.0**-64, -1.0)
        holding = np.where(can_be, cached + wanted, -1.0)
        is_outsider = np.ones(n, np.bool_)
        is_outsider[np.argpartition(wanted, n - NUM_CANDIDATES)[n - NUM_CANDIDATES :]] = False
        is_outsider[np.argpartition(holding, n - NUM_HOLDERS)[n - NUM_HOLDERS :]] = False
        penalties_s[is_outsider] += OUTSIDER_S

    def _best(self, ranking: Floats, cached: Floats, place: int) -> int:
        least_s = ranking.min()
        (equal,) = np.nonzero(ranking <= least_s + max(EQUAL_S, EQUAL_SHARE * (least_s % _LAST_S)))
        equal = equal[cached[equal] == cached[equal].max()]
        if len(equal) == 1:
            return int(equal[0])
        return int(equal[np.argmax(weights(self._table.columns.nodes[equal], place))])

    def _record(self, request: RoutingRequest, ranking: Floats, best: int, costs: Costs, cached: Floats) -> Decision:
        num_ranked = min(len(self._table), NUM_RANKED)
        first = np.argpartition(ranking, num_ranked - 1)[:num_ranked]
        order = [row for row in first[np.argsort(ranking[first], kind="stable")].tolist() if row != best]
        num_usable = int(np.count_nonzero(ranking < _LAST_S))
        return Decision(
            request_id=request.request_id,
            reason=_reason(ranking, best, cached, num_usable),
            chosen=self._candidate(best, costs, cached),
            alternatives=tuple(self._candidate(row, costs, cached) for row in order[:NUM_ALTERNATIVES]),
            order=tuple(map(self._table.name_of, (best, *order)))[:num_ranked],
            num_prompt_tokens=request.prefix.num_prompt_tokens,
            num_usable=num_usable,
        )

    def _candidate(self, row: int, costs: Costs, cached: Floats) -> Candidate:
        return Candidate(
            replica=self._table.name_of(row),
            total_s=float(costs.total_s[row]),
            wait_s=float(costs.wait_s[row]),
            turn_s=float(costs.turn_s[row]),
            reread_s=float(costs.reread_s[row]),
            disturbance_s=float(costs.disturbance_s[row]),
            answer_s=float(costs.answer_s[row]),
            silence_s=float(costs.silence_s[row]),
            num_cached_tokens=int(cached[row]),
        )

    def _note_choice(self, request: RoutingRequest, decision: Decision, names: tuple[int, ...], now_s: float) -> None:
        chosen = decision.chosen
        # Asked again before it was sent (all places were taken): the earlier choice never became a try.
        tried = self._tried.pop(request.request_id, ())
        if self._local.where(request.request_id) is not None:
            tried = tried[:-1]
        self._tried[request.request_id] = (*tried, chosen.replica)
        if len(self._tried) > NUM_TRIES_KEPT:
            self._tried.popitem(last=False)
        num_new = max(0, decision.num_prompt_tokens - chosen.num_cached_tokens)
        self._move(request.request_id, chosen.replica, num_new, now_s)
        self._index.assume(self._table.row_of(chosen.replica), names, now_s)

    def _move(self, request_id: str, replica: str, num_tokens: int, now_s: float) -> None:
        before = self._local.sent(request_id, replica, num_tokens, now_s)
        self._correct(replica)
        if before is not None and before in self._table:
            self._correct(before)

    def _correct(self, replica: str) -> None:
        self._table.correct(replica, self._local.difference(replica))


def _reason(ranking: Floats, best: int, cached: Floats, num_usable: int) -> Reason:
    usable = ranking < _LAST_S
    if not num_usable:
        return Reason.LAST_RESORT
    if num_usable == 1:
        return Reason.ONLY
    most = cached[usable].max()
    if most == 0:
        return Reason.COLD
    return Reason.CACHED if cached[best] == most else Reason.MOVED
