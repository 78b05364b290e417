"""`metalslots status`: what a running endpoint shows of itself.

Owns: asking for it, once or again and again. Must not know: Ray or the engine, how it is drawn (status_view.py).
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from typing import Annotated, Any

import httpx
import typer
from rich.console import RenderableType
from rich.live import Live

from serve_app.cli.console import CommandFailedError, endpoint_of, out, print_json, reports_errors
from serve_app.cli.status_view import lost, view
from serve_app.cli.trust import Authority, office_trust
from serve_app.trust import untrusted

DEFAULT_URL = "http://127.0.0.1:8000"
WATCH_PERIOD_S = 1.0
REQUEST_TIMEOUT_S = 10.0
STATUS = "/status"
PICTURE = "/dashboard/state"


@reports_errors
def status(
    url: Annotated[str, typer.Option(help="Address of the endpoint.")] = DEFAULT_URL,
    key: Annotated[str | None, typer.Option(envvar="METALSLOTS_API_KEY", help="API key, if it asks for one.")] = None,
    authority: Authority = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that is known as JSON.")] = False,
) -> None:
    """Show Macs, slots, queue and memory of a running endpoint: the dashboard in a terminal."""
    url, trust = endpoint_of(url), office_trust(authority)
    if as_json:
        print_json(_fetch(url, STATUS, key, trust))
        return
    shown: RenderableType = view(url, _fetch(url, PICTURE, key, trust))
    if not watch:
        out.print(shown)
        return
    if not out.is_terminal:
        raise CommandFailedError("This is no terminal to watch in.", "leave out --watch, or use --json")
    with Live(shown, console=out, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_PERIOD_S)
            try:
                shown = view(url, _fetch(url, PICTURE, key, trust))
                live.update(shown, refresh=True)
            except CommandFailedError as error:
                # An endpoint that restarts is what one watches for: the last picture stays, and says that it is old.
                live.update(lost(shown, error.message), refresh=True)


def _fetch(url: str, path: str, key: str | None, trust: ssl.SSLContext) -> Mapping[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(f"{url}{path}", headers=headers, timeout=REQUEST_TIMEOUT_S, trust_env=False, verify=trust)
        response.raise_for_status()
        document: Mapping[str, Any] = response.json()
        return document
    except httpx.HTTPStatusError as error:
        raise CommandFailedError(f"{url} answered {error.response.status_code}.", "check --url and --key") from error
    except (httpx.HTTPError, ValueError) as error:
        if (refusal := untrusted(url, error)) is not None:
            raise refusal from error
        raise CommandFailedError(
            f"No endpoint answers at {url} ({error}).", "start one with `metalslots serve`, or give its --url"
        ) from error
