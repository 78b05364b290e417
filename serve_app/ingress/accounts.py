"""What each key has used, and when that is too much. Pure: time comes from a clock that is passed in.

Owns: the windows of a minute, open requests, the totals, the refusals. Must not know: HTTP, Ray, who keeps the book.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from serve_app.errors import RateLimitError
from serve_app.keys import ApiKey

WINDOW_S = 60.0
Clock = Callable[[], float]


@dataclass(slots=True)
class Totals:
    """Since the book was opened."""

    requests: int = 0
    tokens: int = 0
    refused: int = 0
    open: int = 0


class KeyAccount:
    """One key's use. ``clock`` returns seconds that never go back."""

    def __init__(self, key: ApiKey, clock: Clock = time.monotonic) -> None:
        self.totals = Totals()
        self._key = key
        self._clock = clock
        self._requests: deque[tuple[float, int]] = deque()
        self._tokens: deque[tuple[float, int]] = deque()

    def enter(self) -> None:
        """Begin a request. Raises RateLimitError with the time until it might go through."""
        now_s = self._clock()
        try:
            self._require("requests per minute", self._key.requests_per_minute, self._requests, now_s)
            self._require("tokens per minute", self._key.tokens_per_minute, self._tokens, now_s)
            limit = self._key.max_parallel
            if limit is not None and self.totals.open >= limit:
                raise RateLimitError("parallel requests", limit, 1.0)
        except RateLimitError:
            self.totals.refused += 1
            raise
        self._requests.append((now_s, 1))
        self.totals.requests += 1
        self.totals.open += 1

    def leave(self) -> None:
        """End a request."""
        self.totals.open -= 1

    def spend(self, num_tokens: int) -> None:
        """Count tokens that were computed for a request."""
        if num_tokens:
            self._tokens.append((self._clock(), num_tokens))
            self.totals.tokens += num_tokens

    def _require(self, what: str, limit: int | None, used: deque[tuple[float, int]], now_s: float) -> None:
        while used and used[0][0] <= now_s - WINDOW_S:
            used.popleft()
        if limit is None or (over := sum(count for _, count in used) + 1 - limit) <= 0:
            return
        # When enough of what was used has left the window.
        free_s = now_s
        for used_s, count in used:
            free_s, over = used_s + WINDOW_S, over - count
            if over <= 0:
                break
        raise RateLimitError(what, limit, free_s - now_s)


class AccountBook:
    """All keys' accounts. A request is open from ``enter`` to ``leave``, for ``lease_s`` at most: whoever should have
    said that it is over may be gone.
    """

    def __init__(self, keys: Iterable[ApiKey], lease_s: float, clock: Clock = time.monotonic) -> None:
        self._accounts = {key.name: KeyAccount(key, clock) for key in keys}
        self._lease_s = lease_s
        self._clock = clock
        # In the order in which they end, because all last equally long.
        self._leases: dict[str, tuple[str, float]] = {}

    def enter(self, name: str, lease: str) -> None:
        """Begin the request ``lease`` of the key ``name``. Raises RateLimitError."""
        self._end_overdue()
        self._accounts[name].enter()
        self._leases[lease] = (name, self._clock() + self._lease_s)

    def spend(self, name: str, num_tokens: int) -> None:
        """Count tokens of the key ``name``."""
        self._accounts[name].spend(num_tokens)

    def leave(self, lease: str) -> None:
        """End a request; nothing happens for one that is not open here."""
        entry = self._leases.pop(lease, None)
        if entry is not None:
            self._accounts[entry[0]].leave()

    def usage(self) -> dict[str, dict[str, int]]:
        """Totals by key's name."""
        self._end_overdue()
        return {name: asdict(account.totals) for name, account in self._accounts.items()}

    def _end_overdue(self) -> None:
        now_s = self._clock()
        while (first := next(iter(self._leases), None)) is not None and self._leases[first][1] <= now_s:
            self.leave(first)
