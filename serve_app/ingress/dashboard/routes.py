"""The dashboard's addresses.

Owns: which address gives what; the stream of pictures; signing in and out. Must not know: Ray, keys' texts beyond
passing one on.

A browser sends no header of ours when a person opens a page, so a key is kept in a cookie that scripts cannot read and
other sites cannot use; ``auth.KeyGuard`` takes it where it takes any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, StreamingResponse
from starlette.responses import Response

from serve_app.errors import UnauthorizedError
from serve_app.ingress import sse
from serve_app.ingress.auth import COOKIE, PAGE, KeyBook
from serve_app.ingress.dashboard import pages
from serve_app.ingress.dashboard.observatory import Observatory
from serve_app.ingress.dashboard.trial import TrialShape
from serve_app.ingress.fleet import Fleet
from serve_app.ingress.generation_routes import Generation
from serve_app.ingress.observing import IngressWatch
from serve_app.ingress.openai_types import ChatCompletionRequest
from serve_app.ingress.scope import key_in
from serve_app.ingress.translate import chat_call

# Serve waits for open streams before it stops an ingress, so none stays open for long: the page asks again at once.
STREAM_S = 10.0
_COOKIE_AGE_S = 30 * 24 * 3600
_MAX_FORM_BYTES = 4096


def add_dashboard(app: FastAPI, fleet: Fleet, book: KeyBook, generation: Generation, watch: IngressWatch) -> None:
    """Add the page, its files, its stream, and the form behind which they are."""
    observatory = Observatory(fleet, watch)
    _add_files(app)
    _add_sign_in(app, book)

    @app.get(f"{PAGE}/state", include_in_schema=False)
    async def state() -> dict[str, Any]:
        return await observatory.look()

    @app.get(f"{PAGE}/events", include_in_schema=False)
    async def events(request: Request) -> Response:
        key = key_in(request.scope)
        stream = _events(observatory, key.name if key else None)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(stream, media_type=sse.CONTENT_TYPE, headers=headers)

    @app.post(f"{PAGE}/try", include_in_schema=False, response_class=Response)
    async def try_it(body: ChatCompletionRequest, request: Request) -> Response:
        call = chat_call(body, generation.context(request, "try", body.model))
        return generation.respond(call, TrialShape(call.request_id), stream=True)


def _add_files(app: FastAPI) -> None:
    @app.get(PAGE, include_in_schema=False)
    async def page() -> Response:
        return pages.file("index.html")

    names = frozenset(pages.file_names())

    @app.get(f"{PAGE}/static/{{name}}", include_in_schema=False)
    async def file(name: str) -> Response:
        return pages.file(name) if name in names else Response("There is no such file.", 404)


def _add_sign_in(app: FastAPI, book: KeyBook) -> None:
    @app.post(f"{PAGE}/sign-in", include_in_schema=False)
    async def sign_in(request: Request) -> Response:
        body = await request.body()
        (text, *_) = parse_qs(body[:_MAX_FORM_BYTES].decode("utf-8", "replace")).get("key", [""])
        try:
            book.key_named(text.strip())
        except UnauthorizedError as error:
            return pages.sign_in(error.message)
        response = RedirectResponse(PAGE, 303)
        secure = request.url.scheme == "https"
        response.set_cookie(
            COOKIE, text.strip(), _COOKIE_AGE_S, path="/", secure=secure, httponly=True, samesite="strict"
        )
        return response

    @app.post(f"{PAGE}/sign-out", include_in_schema=False)
    async def sign_out() -> Response:
        response = RedirectResponse(PAGE, 303)
        response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
        return response


async def _events(observatory: Observatory, key_name: str | None) -> AsyncIterator[bytes]:
    """Pictures, for a while."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + STREAM_S
    yield b"retry: 500\n\n"
    async with aclosing(observatory.watch()) as pictures:  # type: ignore[type-var]
        async for picture in pictures:
            yield sse.event(picture | {"key": key_name})
            if loop.time() > until_s:
                return
