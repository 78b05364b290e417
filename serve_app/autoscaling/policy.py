"""Decides how many replicas there should be, from how much work there is. Pure: time comes in as an argument.

Owns: the rule, its memory, and the reason for every decision. Must not know: Ray Serve, or how replicas start.

    need   = ceil((running + waiting + queued in routers) / (slots of a replica x target load)) + spare + draining
    up     when more are needed for ``up_after_s``; straight to the need
    down   when fewer were needed for ``down_after_s``; to the most that was needed in that time
    held   while replicas load: what waits then waits for them. Only work that would fill even those goes further up

On machines that one owns, a replica costs nothing but its start and a warm cache. So it is eager up, and slow down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """``target_load``: share of the slots that should be in use. ``num_spare``: replicas beyond the need."""

    min_replicas: int = 1
    max_replicas: int = 1
    num_spare: int = 0
    target_load: float = 0.75
    up_after_s: float = 2.0
    down_after_s: float = 300.0


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """A moment of one model's replicas. ``num_ready`` run, ``num_wanted`` is the last decision; the difference loads.

    ``slots``: of one replica in the mean. ``num_draining`` of them take nothing new.
    """

    num_ready: int
    num_wanted: int
    slots: float
    num_running: float = 0.0
    num_waiting: float = 0.0
    num_in_routers: float = 0.0
    num_draining: int = 0

    @property
    def num_requests(self) -> float:
        """All that is there to do."""
        return self.num_running + self.num_waiting + self.num_in_routers


@dataclass(frozen=True, slots=True)
class ScalingMemory:
    """What the rule keeps from one decision to the next. ``peak``: the most that was needed since ``below_since_s``."""

    above_since_s: float | None = None
    below_since_s: float | None = None
    peak: int = 0


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """How many replicas there should be, why, and what to remember."""

    num_replicas: int
    reason: str
    memory: ScalingMemory


def decide(rules: ScalingRules, load: FleetLoad, memory: ScalingMemory, now_s: float) -> ScalingDecision:
    """Return the decision for this moment."""
    need = _need(rules, load)
    if need > load.num_wanted:
        return _more(rules, load, memory, need, now_s)
    if need < load.num_wanted:
        return _fewer(rules, load, memory, need, now_s)
    return ScalingDecision(need, f"{_work(rules, load)}: {need} replicas are right", ScalingMemory())


def _more(rules: ScalingRules, load: FleetLoad, memory: ScalingMemory, need: int, now_s: float) -> ScalingDecision:
    since_s = memory.above_since_s if memory.above_since_s is not None else now_s
    waiting = ScalingMemory(above_since_s=since_s)
    num_loading = load.num_wanted - load.num_ready
    if num_loading > 0 and load.num_requests <= load.num_wanted * load.slots:
        reason = f"{_work(rules, load)}: {need} needed; held, {num_loading} of {load.num_wanted} replicas still load"
        return ScalingDecision(load.num_wanted, reason, waiting)
    if load.num_wanted < rules.min_replicas:
        reason = f"{load.num_wanted} -> {need}: at least {rules.min_replicas} are configured"
        return ScalingDecision(need, reason, ScalingMemory())
    if now_s - since_s < rules.up_after_s:
        reason = f"{_work(rules, load)}: {need} needed for {now_s - since_s:.1f} of {rules.up_after_s:g} s"
        return ScalingDecision(load.num_wanted, reason, waiting)
    return ScalingDecision(need, f"{load.num_wanted} -> {need}: {_work(rules, load)}", ScalingMemory())


def _fewer(rules: ScalingRules, load: FleetLoad, memory: ScalingMemory, need: int, now_s: float) -> ScalingDecision:
    since_s = memory.below_since_s if memory.below_since_s is not None else now_s
    peak = max(need, memory.peak if memory.below_since_s is not None else 0)
    if load.num_wanted > rules.max_replicas:
        reason = f"{load.num_wanted} -> {rules.max_replicas}: at most {rules.max_replicas} are configured"
        return ScalingDecision(rules.max_replicas, reason, ScalingMemory())
    if now_s - since_s < rules.down_after_s:
        reason = f"{_work(rules, load)}: {need} needed for {now_s - since_s:.0f} of {rules.down_after_s:g} s"
        return ScalingDecision(load.num_wanted, reason, ScalingMemory(below_since_s=since_s, peak=peak))
    reason = f"{load.num_wanted} -> {peak}: no more were needed for {rules.down_after_s:g} s ({_work(rules, load)})"
    return ScalingDecision(peak, reason, ScalingMemory())


def _need(rules: ScalingRules, load: FleetLoad) -> int:
    per_replica = max(1.0, load.slots) * rules.target_load
    busy = math.ceil(load.num_requests / per_replica - 1e-9)
    return min(rules.max_replicas, max(rules.min_replicas, busy + rules.num_spare) + load.num_draining)


def _work(rules: ScalingRules, load: FleetLoad) -> str:
    # Means over a moment, so seldom whole.
    running, waiting, in_routers = (
        f"{round(number, 1):g}" for number in (load.num_running, load.num_waiting, load.num_in_routers)
    )
    work = f"{running} running + {waiting} waiting + {in_routers} in routers"
    spare = f", {rules.num_spare} spare" if rules.num_spare else ""
    draining = f", {load.num_draining} draining" if load.num_draining else ""
    return f"{work} on {load.slots:g} slots each at {rules.target_load:.0%}{spare}{draining}"
