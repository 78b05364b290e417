"""`metalslots status`: what a running endpoint says of itself.

Owns: reading /status and showing it in a terminal. Must not know: Ray or the engine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import httpx
import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from serve_app.cli.console import CommandFailedError, out, print_json, reports_errors
from serve_app.cli.trust import office_trust

DEFAULT_URL = "http://127.0.0.1:8000"
WATCH_PERIOD_S = 1.0
REQUEST_TIMEOUT_S = 10.0


@reports_errors
def status(
    url: Annotated[str, typer.Option(help="Address of the endpoint.")] = DEFAULT_URL,
    key: Annotated[str | None, typer.Option(envvar="METALSLOTS_API_KEY", help="API key, if it asks for one.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document as it is.")] = False,
) -> None:
    """Show Macs, slots, queue and memory of a running endpoint."""
    document = _fetch(url, key)
    if as_json:
        print_json(document)
    elif not watch:
        out.print(_view(url, document))
    else:
        with Live(_view(url, document), console=out) as live:
            while True:
                time.sleep(WATCH_PERIOD_S)
                live.update(_view(url, _fetch(url, key)))


def _fetch(url: str, key: str | None) -> Mapping[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(
            f"{url}/status", headers=headers, timeout=REQUEST_TIMEOUT_S, trust_env=False, verify=office_trust()
        )
        response.raise_for_status()
        document: Mapping[str, Any] = response.json()
        return document
    except httpx.HTTPStatusError as error:
        raise CommandFailedError(f"{url} answered {error.response.status_code}.", "check --url and --key") from error
    except (httpx.HTTPError, ValueError) as error:
        raise CommandFailedError(
            f"No endpoint answers at {url} ({error}).", "start one with `metalslots serve`, or give its --url"
        ) from error


def _view(url: str, document: Mapping[str, Any]) -> Group:
    replicas = document.get("replicas", [])
    table = Table(box=None, padding=(0, 1))
    for column in ("Mac", "model", "state", "slots", "waiting", "blocks used", "cached", "steps", "tokens"):
        table.add_column(column, overflow="fold")
    for replica in replicas:
        table.add_row(*_row(replica))
    head = Text(f"{url}: {sum(bool(replica.get('ready')) for replica in replicas)} of {len(replicas)} replicas ready")
    return Group(head, table, *_disclosures(replicas))


def _row(replica: Mapping[str, Any]) -> tuple[str, ...]:
    name = (_known(replica.get("host")), _known(replica.get("model")))
    engine = replica.get("engine")
    if engine is None:
        return (*name, "not known", *["-"] * 6)
    scheduler = engine["scheduler"]
    total = scheduler["num_blocks_total"]
    held = total - scheduler["num_blocks_free"] - scheduler["num_blocks_cached"]
    return (
        *name,
        engine["state"],
        f"{scheduler['num_running']} of {scheduler['slots']} ({engine['slots_asked']})",
        f"{scheduler['num_waiting']} ({scheduler['num_waiting_tokens']} tokens)",
        f"{held} of {total}",
        f"{scheduler['num_blocks_cached']}",
        f"{scheduler['num_steps']}",
        f"{scheduler['num_prompt_tokens']} in, {scheduler['num_output_tokens']} out",
    )


def _known(value: object) -> str:
    return "-" if value is None else str(value)


def _disclosures(replicas: list[Mapping[str, Any]]) -> list[Text]:
    lines: dict[str, None] = {}
    for replica in replicas:
        for sentence in ((replica.get("engine") or {}).get("model") or {}).get("disclosures", ()):
            lines[f"{replica.get('host')}: {sentence}"] = None
    return [Text(line, style="dim") for line in lines]
