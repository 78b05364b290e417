"""The dashboard's files, and the headers that keep everything else out of the page.

Owns: which files there are, their content types and security headers. Must not know: who may see them.
"""

from __future__ import annotations

import html
from functools import cache
from pathlib import Path

from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
CONTENT_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "cache-control": "no-cache",
    # Nothing from anywhere else, nothing inline, in nobody's frame.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    # Not "no-referrer": with it browsers call a form's own page "null", and the key in the cookie would not count.
    "referrer-policy": "same-origin",
}
_MESSAGE = "<!-- message -->"


@cache
def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def file_names() -> list[str]:
    """The files that the page consists of, but for the page itself and the one to sign in."""
    return sorted(path.name for path in STATIC.iterdir() if path.suffix in (".css", ".js", ".svg"))


def file(name: str, status: int = 200) -> Response:
    """One of them."""
    return Response(_read(name), status, HEADERS, f"{CONTENT_TYPES[Path(name).suffix]}; charset=utf-8")


def sign_in(message: str = "") -> Response:
    """The page that asks for a key."""
    text = f'<p class="error" role="alert">{html.escape(message)}</p>' if message else ""
    page = _read("sign-in.html").replace(_MESSAGE, text)
    return Response(page, 401, HEADERS, "text/html; charset=utf-8")
