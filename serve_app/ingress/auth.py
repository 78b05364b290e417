"""Lets in who has a key, as often as the key allows.

Owns: the key in a request's headers or in the dashboard's cookie, and the answers to those who are not let in. Must
not know: what is asked, who counts what a key has used (ledger.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.errors import RateLimitError, UnauthorizedError
from serve_app.ingress.accounts import AccountBook
from serve_app.ingress.dashboard import pages
from serve_app.ingress.ledger import Door, LocalDoor, Visit
from serve_app.ingress.primed import error_response
from serve_app.ingress.scope import KEY, NOTE
from serve_app.keys import ApiKey, find_key
from serve_app.protocol import Deltas

# For balancers and monitoring: they say nothing about anybody's requests.
OPEN_PATHS = frozenset({"/health", "/metrics", "/dashboard/sign-in", "/dashboard/static/style.css"})
COOKIE = "metalslots_key"
PAGE = "/dashboard"
_LEASE_S = 3600.0


class KeyBook:
    """All keys. Without keys everybody is let in, and nothing is counted. ``door`` None: this process counts."""

    def __init__(self, keys: Sequence[ApiKey], door: Door | None = None) -> None:
        self._keys = tuple(keys)
        self.door: Door = door or LocalDoor(AccountBook(self._keys, _LEASE_S))

    def key_of(self, headers: Headers) -> ApiKey | None:
        """The request's key; None when no keys are needed. Raises UnauthorizedError."""
        if not self._keys:
            return None
        scheme, _, text = headers.get("authorization", "").partition(" ")
        text = text.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return self.key_named(text or _key_of_our_page(headers))

    def key_named(self, text: str) -> ApiKey | None:
        """The key that is written ``text``; None when no keys are needed. Raises UnauthorizedError."""
        key = find_key(self._keys, text)
        if key is None and self._keys:
            raise UnauthorizedError("The API key is missing or not known here." if text else "An API key is needed.")
        return key


class KeyGuard:
    """ASGI middleware: lets a request through with its key in the scope, or answers 401 or 429."""

    def __init__(self, app: ASGIApp, book: KeyBook) -> None:
        self._app = app
        self._book = book

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            key = scope[KEY] = self._book.key_of(Headers(scope=scope))
            # Only what costs something counts: whoever looks at the status does not use up a limit.
            visit = await self._book.door.enter(key) if key is not None and scope["method"] == "POST" else None
        except UnauthorizedError as error:
            is_page = scope["path"] == PAGE and scope["method"] == "GET"
            response = error_response(error, scope["path"], {"WWW-Authenticate": "Bearer"})
            await (pages.sign_in() if is_page else response)(scope, receive, send)
            return
        except RateLimitError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        if visit is None:
            await self._app(scope, receive, send)
            return
        scope[NOTE] = _counting(visit)
        try:
            await self._app(scope, receive, send)
        finally:
            visit.leave()


def _counting(visit: Visit) -> Callable[[Deltas], None]:
    """Count the tokens of each message of an answer, and with the last one those of the prompt."""

    def note(message: Deltas) -> None:
        count = sum(len(choice.token_ids) for choice in message.choices)
        visit.spend(count + (message.usage.num_prompt_tokens if message.usage else 0))

    return note


def _key_of_our_page(headers: Headers) -> str:
    """The key in the cookie that the dashboard's form sets; none in a request that another page has made."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
    if site not in ("same-origin", "none") or (origin and urlsplit(origin).netloc != headers.get("host", "")):
        return ""
    return cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
