"""Lets in who has a key, as often as the key allows.

Owns: the key in a request's headers, what each key has used, the refusals. Must not know: what is asked.

Each ingress counts for itself: with several Macs a key's limits hold on each of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.errors import RateLimitError, UnauthorizedError
from serve_app.ingress.primed import NOTE_KEY, error_response
from serve_app.keys import ApiKey, find_key
from serve_app.protocol import Deltas

WINDOW_S = 60.0
# For balancers and monitoring: they say nothing about anybody's requests.
OPEN_PATHS = frozenset({"/health", "/metrics"})
_SCOPE_KEY = "metalslots.key"


class KeyAccount:
    """What one key has used. ``clock`` returns seconds that never go back."""

    def __init__(self, key: ApiKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self.num_requests = 0
        self.num_tokens = 0
        self.num_refused = 0
        self.num_open = 0
        self._clock = clock
        self._requests: deque[tuple[float, int]] = deque()
        self._tokens: deque[tuple[float, int]] = deque()

    def enter(self) -> None:
        """Begin a request. Raises RateLimitError with the time until it might go through."""
        now_s = self._clock()
        try:
            self._require("requests per minute", self.key.requests_per_minute, self._requests, now_s)
            self._require("tokens per minute", self.key.tokens_per_minute, self._tokens, now_s)
            limit = self.key.max_parallel
            if limit is not None and self.num_open >= limit:
                raise RateLimitError("parallel requests", limit, 1.0)
        except RateLimitError:
            self.num_refused += 1
            raise
        self._requests.append((now_s, 1))
        self.num_requests += 1
        self.num_open += 1

    def leave(self) -> None:
        """End a request."""
        self.num_open -= 1

    def note(self, message: Deltas) -> None:
        """Count the tokens of one message of an answer, and with the last one those of the prompt."""
        count = sum(len(choice.token_ids) for choice in message.choices)
        count += message.usage.num_prompt_tokens if message.usage else 0
        if count:
            self._tokens.append((self._clock(), count))
            self.num_tokens += count

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


class KeyBook:
    """All keys with their accounts. Without keys everybody is let in, and nothing is counted."""

    def __init__(self, keys: Sequence[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = tuple(keys)
        self._accounts = {key.name: KeyAccount(key, clock) for key in keys}

    @property
    def usage(self) -> dict[str, dict[str, int]]:
        """Totals by key's name since this ingress started."""
        return {
            name: {
                "requests": account.num_requests,
                "tokens": account.num_tokens,
                "refused": account.num_refused,
                "open": account.num_open,
            }
            for name, account in self._accounts.items()
        }

    def account_of(self, headers: Headers) -> KeyAccount | None:
        """The account of a request's key; None when no keys are needed. Raises UnauthorizedError."""
        if not self._keys:
            return None
        scheme, _, text = headers.get("authorization", "").partition(" ")
        text = text.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        key = find_key(self._keys, text)
        if key is None:
            raise UnauthorizedError("The API key is missing or not known here." if text else "An API key is needed.")
        return self._accounts[key.name]


class KeyGuard:
    """ASGI middleware: lets a request through with its key's account in the scope, or answers 401 or 429."""

    def __init__(self, app: ASGIApp, book: KeyBook) -> None:
        self._app = app
        self._book = book

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            account = self._book.account_of(Headers(scope=scope))
            # Only what costs something counts: whoever looks at the status does not use up a limit.
            counted = account if scope["method"] == "POST" else None
            if counted is not None:
                counted.enter()
        except UnauthorizedError as error:
            await error_response(error, scope["path"], {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        except RateLimitError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        scope[_SCOPE_KEY] = account
        if account is not None:
            scope[NOTE_KEY] = account.note
        try:
            await self._app(scope, receive, send)
        finally:
            if counted is not None:
                counted.leave()


def account_in(scope: Scope) -> KeyAccount | None:
    """The account that the request in ``scope`` was let in with."""
    account: KeyAccount | None = scope.get(_SCOPE_KEY)
    return account
