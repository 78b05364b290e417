"""Names every request: the client's own name for it goes back to the client, and who gave none gets one.

Owns: the header X-Request-Id. Must not know: what is asked.
"""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = "x-request-id"
# What can go back in a header, and into a log line, as it came.
_PLAIN = re.compile(r"[\x21-\x7e]{1,200}")


class RequestIds:
    """ASGI middleware around everything else. ``echoes`` False: whoever is in front puts the name on the answer."""

    def __init__(self, app: ASGIApp, *, echoes: bool) -> None:
        self._app = app
        self._echoes = echoes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on under its name, and put that name on the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(_HEADER, "")
        name = given if _PLAIN.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        raw = (_HEADER.encode(), name.encode())
        scope["headers"] = [*(header for header in scope["headers"] if header[0] != raw[0]), raw]

        async def send_named(message: Message) -> None:
            if self._echoes and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), raw]
            await send(message)

        await self._app(scope, receive, send_named)
