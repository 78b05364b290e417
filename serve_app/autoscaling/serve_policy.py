"""Ray Serve's side of the scaling policy: its context in, its number out.

Owns: reading Serve's context. Must not know: the rule. Serve pickles this module by value into its controller, where it
runs several times a second, so it is small, never waits, and needs nothing but this package to be installed there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from serve_app.autoscaling import journal
from serve_app.autoscaling.policy import FleetLoad, ScalingMemory, ScalingRules, decide

MEMORY = "metalslots_memory"
REASON = "metalslots_reason"


class ServeScaling:
    """What Serve calls. ``rules``: fields of ``ScalingRules``. ``slots``: until a replica has reported its own."""

    def __init__(self, rules: Mapping[str, Any], slots: int) -> None:
        self._rules = ScalingRules(**rules)
        self._slots = slots

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and what Serve shall give back the next time."""
        state = context.policy_state
        load = self._load(context)
        decision = decide(self._rules, load, state.get(MEMORY, ScalingMemory()), context.current_time)
        if decision.num_replicas != load.num_wanted:
            self._tell(context, load.num_wanted, decision.num_replicas, decision.reason)
        return decision.num_replicas, {MEMORY: decision.memory, REASON: decision.reason}

    def _tell(self, context: Any, num_before: int, num_after: int, reason: str) -> None:
        """Into the controller's log, and to where dashboards and metrics read it."""
        logger = logging.getLogger("ray.serve")
        logger.info("scaling %s: %s", context.deployment_name, reason)
        try:
            noted = journal.NotedScaling(context.current_time, num_before, num_after, reason)
            journal.note(context.deployment_name, noted)
        except Exception:
            # The policy has to go on whatever becomes of its history.
            logger.exception("the scaling decision could not be noted")

    def _load(self, context: Any) -> FleetLoad:
        figures = context.aggregated_metrics or {}
        slots = [value for value in figures.get("slots", {}).values() if value > 0]
        return FleetLoad(
            num_ready=context.current_num_replicas,
            num_wanted=context.target_num_replicas,
            slots=sum(slots) / len(slots) if slots else self._slots,
            num_running=sum(figures.get("running", {}).values()),
            num_waiting=sum(figures.get("waiting", {}).values()),
            num_in_routers=context.total_queued_requests or 0.0,
            num_draining=sum(value > 0 for value in figures.get("draining", {}).values()),
        )
