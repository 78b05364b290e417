"""Fair shares between users, by virtual token counters.

Owns: what each user has been served, in tokens, and who is served less than the others. Must not know: queues, slots,
blocks.

Each user has a counter: tokens computed for them, answer tokens weighing more (they cost a whole step each). Whoever
has the lowest counter is next. A user who comes back after idling is lifted to the level at which service is now, so
that idleness cannot be saved up and spent at once (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024, the virtual token counter; the lift here is to the counter last served instead of the lowest one waiting, which
needs no search).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from engine.scheduler.request_state import Place, Request

OUTPUT_TOKEN_WEIGHT = 2.0
_NUM_IDLE_USERS_KEPT = 1024


@dataclass(slots=True)
class UserShare:
    """``num_requests`` counts requests in the scheduler, ``num_in_slots`` those of them that hold a slot."""

    counter: float = 0.0
    num_requests: int = 0
    num_in_slots: int = 0


class FairShares:
    """Counters of all users with a request, and of recent ones."""

    def __init__(self) -> None:
        self._shares: dict[str, UserShare] = {}
        self._level = 0.0
        self._num_active = 0

    def __getitem__(self, user: str) -> UserShare:
        return self._shares[user]

    @property
    def num_active_users(self) -> int:
        """Users with at least one request waiting or running."""
        return self._num_active

    def enter(self, user: str) -> None:
        """A request of ``user`` arrives."""
        share = self._shares.setdefault(user, UserShare())
        if share.num_requests == 0:
            share.counter = max(share.counter, self._level)
            self._num_active += 1
        share.num_requests += 1

    def leave(self, user: str) -> None:
        """A request of ``user`` is gone."""
        share = self._shares[user]
        share.num_requests -= 1
        if share.num_requests == 0:
            self._num_active -= 1
            self._forget_idle()

    def selected(self, user: str) -> None:
        """A request of ``user`` was chosen because nobody had been served less."""
        self._level = max(self._level, self._shares[user].counter)

    def charge(self, user: str, num_computed_tokens: int, num_output_tokens: int) -> None:
        """Tokens were computed and sampled for ``user``."""
        self._shares[user].counter += num_computed_tokens + OUTPUT_TOKEN_WEIGHT * num_output_tokens

    def fair_slots(self, num_slots: int) -> int:
        """Slots that each active user may hold when all want them."""
        return max(1, num_slots // max(1, self._num_active))

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError naming what does not add up against all living requests."""
        living = list(requests)
        num_requests = Counter(request.user for request in living)
        num_in_slots = Counter(request.user for request in living if request.place is Place.SLOT)
        assert len(num_requests) == self._num_active, "active users are miscounted"
        for user, share in self._shares.items():
            assert share.num_requests == num_requests[user], f"requests of user {user!r} are miscounted"
            assert share.num_in_slots == num_in_slots[user], f"slots of user {user!r} are miscounted"

    def _forget_idle(self) -> None:
        if self._num_active == 0:
            self._shares.clear()
            self._level = 0.0
        elif len(self._shares) > self._num_active + _NUM_IDLE_USERS_KEPT:
            # An idle user at or below the level would be lifted to it on return: nothing is lost with the record.
            self._shares = {
                user: share for user, share in self._shares.items() if share.num_requests or share.counter > self._level
            }
