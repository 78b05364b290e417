"""Why a request went where it went. Pure.

Owns: the record of one choice, and its sentence. Must not know: how the choice is made.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from serve_app.protocol import Route

NUM_KEPT = 1024


class Reason(StrEnum):
    """What spoke for the chosen replica."""

    ONLY = "only"  # no other can be used
    CACHED = "cached"  # no other has more of the prompt
    MOVED = "moved"  # another has more of the prompt, and waiting there would cost more than reading here
    COLD = "cold"  # nobody has anything of the prompt: the least loaded, or of equals the prompt's own
    LAST_RESORT = "last_resort"  # all that is left is draining, not ready, or has failed this request before


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica's part in a choice: seconds as in ``cost``, and how much of the prompt it has."""

    replica: str
    total_s: float
    wait_s: float
    turn_s: float
    reread_s: float
    disturbance_s: float
    answer_s: float
    silence_s: float
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice. ``order``: the best replicas, best first. ``alternatives``: the best of those not chosen.

    ``decided_unix_s``: when, as whoever asked for the choice has noted; 0 where nobody has.
    """

    request_id: str
    reason: Reason
    chosen: Candidate
    alternatives: tuple[Candidate, ...]
    order: tuple[str, ...]
    num_prompt_tokens: int
    num_usable: int
    decided_unix_s: float = 0.0

    @property
    def route(self) -> Route:
        """What the replica is told of it."""
        return Route(
            replica=self.chosen.replica,
            reason=str(self.reason),
            total_s=self.chosen.total_s,
            num_cached_tokens=self.chosen.num_cached_tokens,
            num_usable=self.num_usable,
            decided_unix_s=self.decided_unix_s,
        )

    def sentence(self) -> str:
        """Return the record as a person would say it."""
        chosen = self.chosen
        cached = f"{chosen.num_cached_tokens} of {self.num_prompt_tokens} tokens cached"
        text = f"{self.request_id} -> {chosen.replica} ({self.reason}): {chosen.total_s:.2f} s, {cached}"
        if self.alternatives:
            other = self.alternatives[0]
            text += f"; next {other.replica}: {other.total_s:.2f} s, {other.num_cached_tokens} cached"
        return text


class DecisionLog:
    """The newest decisions by request; older ones are let go."""

    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._num_kept = num_kept
        self._decisions: OrderedDict[str, Decision] = OrderedDict()

    def add(self, decision: Decision) -> None:
        """Keep ``decision``; a request that is routed again replaces its first decision."""
        self._decisions.pop(decision.request_id, None)
        self._decisions[decision.request_id] = decision
        if len(self._decisions) > self._num_kept:
            self._decisions.popitem(last=False)

    def get(self, request_id: str) -> Decision | None:
        """Return the decision on ``request_id``, if it is still kept."""
        return self._decisions.get(request_id)

    def newest(self, num: int) -> tuple[Decision, ...]:
        """Return the last ``num`` decisions, newest first."""
        return tuple(list(self._decisions.values())[: -num - 1 : -1])
