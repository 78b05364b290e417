"""One book of keys for all ingresses: a deployment of one replica, and how an ingress asks it.

Owns: the way to the book, and what happens when there is none. Must not know: HTTP, what is counted and how
(accounts.py).

A key's limits hold for the endpoint as a whole, whichever Mac a request comes to. A key that has limits pays a round
trip to the book before its request is let in; what it used is told afterwards without waiting. An ingress that cannot
reach the book counts for itself: the limits then hold on each Mac, and nobody is locked out.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from serve_app.config import AppConfig
from serve_app.errors import RateLimitError
from serve_app.ingress.accounts import AccountBook
from serve_app.keys import ApiKey

LEDGER_NAME = "KeyLedger"
ANSWER_LIMIT_S = 1.0
# Tokens of a long answer count before it is over.
TELL_PERIOD_S = 1.0
# A request that is over this long after its time limit was never reported as over.
LEASE_SLACK_S = 60.0

logger = logging.getLogger(__name__)
_on_their_way: set[asyncio.Task[None]] = set()


def lease_s(config: AppConfig) -> float:
    """How long a request counts as open when nobody says that it is over."""
    return config.limits.request_timeout_s + LEASE_SLACK_S


class Visit(Protocol):
    """One request that was let in."""

    def spend(self, num_tokens: int) -> None:
        """Count tokens."""
        ...

    def leave(self) -> None:
        """It is over."""
        ...


class Door(Protocol):
    """Lets requests in, and knows what has been used."""

    async def enter(self, key: ApiKey) -> Visit:
        """Begin a request. Raises RateLimitError."""
        ...

    async def usage(self) -> dict[str, dict[str, int]]:
        """Totals by key's name."""
        ...


class _LocalVisit:
    def __init__(self, book: AccountBook, name: str, lease: str) -> None:
        self._book, self._name, self._lease = book, name, lease

    def spend(self, num_tokens: int) -> None:
        self._book.spend(self._name, num_tokens)

    def leave(self) -> None:
        self._book.leave(self._lease)


class LocalDoor:
    """Counts in this process: for an endpoint with one ingress."""

    def __init__(self, book: AccountBook) -> None:
        self._book = book

    async def enter(self, key: ApiKey) -> Visit:
        """Begin a request. Raises RateLimitError."""
        lease = uuid.uuid4().hex
        self._book.enter(key.name, lease)
        return _LocalVisit(self._book, key.name, lease)

    async def usage(self) -> dict[str, dict[str, int]]:
        """Totals by key's name."""
        return self._book.usage()


class KeyLedger:
    """The deployment that keeps the book. It forgets when it is started anew, as it is when its Mac is lost."""

    def __init__(self, keys: Sequence[ApiKey], lease_s: float) -> None:
        self._book = AccountBook(keys, lease_s)

    async def enter(self, name: str, lease: str) -> RateLimitError | None:
        """Begin a request, or return its refusal."""
        try:
            self._book.enter(name, lease)
        except RateLimitError as refusal:
            return refusal
        return None

    async def tell(self, name: str, num_tokens: int, ended_lease: str = "") -> None:
        """Count tokens of a request, which may have ended with them."""
        self._book.spend(name, num_tokens)
        self._book.leave(ended_lease)

    async def usage(self) -> dict[str, dict[str, int]]:
        """Totals by key's name."""
        return self._book.usage()


class _SharedVisit:
    """Tells the ledger what a request used: now and then, and when it is over."""

    def __init__(self, ledger: Any, name: str, lease: str) -> None:
        self._ledger, self._name, self._lease = ledger, name, lease
        self._num_untold = 0
        self._told_s = time.monotonic()

    def spend(self, num_tokens: int) -> None:
        self._num_untold += num_tokens
        if time.monotonic() - self._told_s >= TELL_PERIOD_S:
            self._tell("")

    def leave(self) -> None:
        self._tell(self._lease)

    def _tell(self, ended_lease: str) -> None:
        num_tokens, self._num_untold = self._num_untold, 0
        self._told_s = time.monotonic()
        _send(self._ledger.tell.remote(self._name, num_tokens, ended_lease))


class SharedDoor:
    """Asks the ledger. ``ledger``: its Serve handle; ``own``: who counts while it does not answer."""

    def __init__(self, ledger: Any, own: LocalDoor) -> None:
        self._ledger = ledger
        self._own = own

    async def enter(self, key: ApiKey) -> Visit:
        """Begin a request. Raises RateLimitError."""
        lease = uuid.uuid4().hex
        asking = self._ledger.enter.remote(key.name, lease)
        if key.is_limited:
            try:
                async with asyncio.timeout(ANSWER_LIMIT_S):
                    refusal = await asking
            except BaseException as error:
                asking.cancel()
                # It may have been let in there all the same, and nobody else will say that it is over.
                _send(self._ledger.tell.remote(key.name, 0, lease))
                if not isinstance(error, Exception):
                    raise
                logger.warning("the ledger of keys does not answer (%r); this ingress counts for itself", error)
                return await self._own.enter(key)
            if refusal is not None:
                raise refusal
        else:
            _send(asking)
        return _SharedVisit(self._ledger, key.name, lease)

    async def usage(self) -> dict[str, dict[str, int]]:
        """Totals by key's name; this ingress's own while the ledger does not answer."""
        asking = self._ledger.usage.remote()
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                totals: dict[str, dict[str, int]] = await asking
                return totals
        except Exception:
            asking.cancel()
            return await self._own.usage()


def _send(message: Any) -> None:
    """Let a message to the ledger go its way; nobody waits for it."""
    task = asyncio.ensure_future(_arrive(message))
    _on_their_way.add(task)
    task.add_done_callback(_on_their_way.discard)


async def _arrive(message: Any) -> None:
    try:
        await message
    except Exception as error:
        logger.debug("the ledger of keys was not told: %r", error)
