"""What the scaling policy decided, where the rest of the fleet can read it.

Owns: the newest decisions of each deployment and their numbers, in Ray's key-value store, for the policy runs inside
Serve's controller and shares nothing with anybody. Must not know: how decisions are made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

NAMESPACE = "metalslots-scaling"
NUM_KEPT = 20


@dataclass(frozen=True, slots=True)
class NotedScaling:
    """One change of the wanted number of replicas."""

    at_unix_s: float
    num_before: int
    num_after: int
    reason: str


@dataclass(frozen=True, slots=True)
class ScalingHistory:
    """A deployment's decisions: how many up and down in all, and the newest, oldest first."""

    num_up: int = 0
    num_down: int = 0
    newest: tuple[NotedScaling, ...] = ()

    def plus(self, noted: NotedScaling) -> ScalingHistory:
        """This and one more."""
        is_up = noted.num_after > noted.num_before
        newest = (*self.newest, noted)[-NUM_KEPT:]
        return ScalingHistory(self.num_up + is_up, self.num_down + (not is_up), newest)


def note(deployment: str, noted: NotedScaling) -> None:
    """Keep a decision. A few milliseconds; decisions are rare."""
    # Imported where it is used: who only reads what a history is does not load Ray.
    from ray.experimental import internal_kv

    history = read(deployment).plus(noted)
    internal_kv._internal_kv_put(deployment, json.dumps(asdict(history)), namespace=NAMESPACE.encode())


def read(deployment: str) -> ScalingHistory:
    """Return a deployment's decisions; none when there are none, or Ray's store does not answer."""
    from ray.experimental import internal_kv

    try:
        found = internal_kv._internal_kv_get(deployment, namespace=NAMESPACE.encode())
    except Exception:
        return ScalingHistory()
    if not found:
        return ScalingHistory()
    values = json.loads(found)
    newest: Sequence[NotedScaling] = [NotedScaling(**value) for value in values["newest"]]
    return ScalingHistory(values["num_up"], values["num_down"], tuple(newest))
