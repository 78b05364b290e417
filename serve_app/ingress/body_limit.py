"""Refuses bodies that are too large, before they are read where the client says how large they are.

Owns: the counting. Must not know: what a body holds.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.errors import RequestTooLargeError
from serve_app.ingress.primed import error_response


class BodyLimit:
    """ASGI middleware around a whole application."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        too_large = error_response(RequestTooLargeError(self._max_body_bytes), scope["path"])
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared) > self._max_body_bytes:
            await too_large(scope, receive, send)
            return
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise _TooLarge
            return message

        try:
            await self._app(scope, receive_counted, send)
        except _TooLarge:
            await too_large(scope, receive, send)


# Not an Exception: everything between the reader of the body and this middleware may catch those.
class _TooLarge(BaseException):
    pass
