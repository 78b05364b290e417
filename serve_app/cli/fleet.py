"""`metalslots deploy`, `drain`, `undrain` and `ready`: the commands for an app on a Ray that runs already.

Owns: what they wait for and print. Must not know: how Ray's nodes are started (k8s-free-deploy does that), or what is
deployed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.console import CommandFailedError, out, print_json, progress, reports_errors
from serve_app.cli.fleet_ray import (
    OWN_RAY,
    app_runs,
    ask_replicas,
    find_node,
    joined,
    living_nodes,
    set_draining,
    set_environment,
)
from serve_app.config import AppConfig, label_resource, read_app_config
from serve_app.node.machine_checks import reach
from serve_app.node.settings import Installation

POLL_S = 0.5
LISTEN_LIMIT_S = 20.0

Address = Annotated[str, typer.Option(help="Ray's address; `auto` on a machine that belongs to it.")]
TokenFile = Annotated[
    Path | None, typer.Option(envvar="RAY_AUTH_TOKEN_PATH", help="File with the fleet's secret.", exists=True)
]
Node = Annotated[str, typer.Argument(help="The Mac: its name, its address, or the beginning of its Ray node id.")]


@reports_errors
def deploy(
    config: Annotated[Path, typer.Argument(help="An app file (configs/apps/*.yaml).", exists=True)],
    address: Address = OWN_RAY,
    token_file: TokenFile = None,
    check: Annotated[bool, typer.Option("--check", help="Only say whether the file is right.")] = False,
    if_needed: Annotated[bool, typer.Option("--if-needed", help="Do nothing when an app runs already.")] = False,
) -> None:
    """Deploy an app file on a running fleet, or update it there, one Mac at a time."""
    settings = read_app_config(config)
    # Before the check, which imports Ray.
    set_environment(address, token_file)
    _check_schema(settings)
    if check:
        out.print(f"{config}: {', '.join(model.name for model in settings.models)} on port {settings.port}")
        return
    with joined(address, token_file):
        if if_needed and app_runs():
            out.print("the app runs already")
            return
        _require_macs(settings)
        _deploy(settings)
        if Installation.here() is not None:
            _require_listener(settings)
    out.print(f"deployed: {', '.join(model.name for model in settings.models)} on port {settings.port} of every Mac")


@reports_errors
def drain(
    node: Node,
    address: Address = OWN_RAY,
    token_file: TokenFile = None,
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds to wait for the answers that run there.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts as JSON.")] = False,
) -> None:
    """Give a Mac nothing new, and wait until what it answers is answered. Exit 1 when that takes longer."""
    with joined(address, token_file):
        found = find_node(node)
        statuses = set_draining(found, True)
        deadline_s = time.monotonic() + wait_s
        while any(status.num_open_calls for status in statuses) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            statuses = set_draining(found, True)
    num_open = sum(status.num_open_calls for status in statuses)
    if as_json:
        print_json({"node_id": found, "replicas": len(statuses), "open_calls": num_open})
    else:
        out.print(f"{node} takes nothing new; {num_open} answers still run there")
    if num_open:
        raise typer.Exit(1)


@reports_errors
def undrain(node: Node, address: Address = OWN_RAY, token_file: TokenFile = None) -> None:
    """Let a drained Mac take requests again."""
    with joined(address, token_file):
        set_draining(find_node(node), False)
    out.print(f"{node} takes requests again")


@reports_errors
def ready(
    node: Node,
    address: Address = OWN_RAY,
    token_file: TokenFile = None,
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds to wait for it.")] = 0.0,
    replicas: Annotated[int, typer.Option(help="How many of its replicas must answer.", min=0)] = 1,
    others: Annotated[bool, typer.Option("--others", help="Ask whether the other Macs can do without it.")] = False,
) -> None:
    """Say whether a Mac answers. Exit 1 when it does not.

    With --others: whether each model of this Mac has a replica on another one that takes requests.
    """
    deadline_s = time.monotonic() + wait_s
    with joined(address, token_file):
        while (reason := _unready(node, None if others else replicas)) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
    if reason:
        raise CommandFailedError(reason, "see `metalslots status`, and the logs in Ray's folder")
    out.print(f"the others can do without {node}" if others else f"{node} is ready")


def _unready(node: str, num_replicas: int | None) -> str:
    """What is missing, in words: on the node itself, or with None on the others when it is away."""
    try:
        node_id = find_node(node)
        statuses = ask_replicas("status")
    except CommandFailedError as error:
        return error.message
    own = [status for status in statuses if status.node_id == node_id]
    if num_replicas is None:
        able = {s.model for s in statuses if s.node_id != node_id and s.ready and not s.draining}
        alone = sorted({status.model for status in own} - able)
        return f"Nobody but {node} answers for {', '.join(alone)}." if alone else ""
    num_ready = sum(status.ready for status in own)
    return "" if num_ready >= num_replicas else f"{num_ready} of {num_replicas} replicas on {node} are ready."


def _check_schema(settings: AppConfig) -> None:
    """Let Serve validate what would be deployed, before anything is changed. Raises CommandFailedError."""
    from serve_app.app import build_app

    try:
        build_app(settings)
    except (TypeError, ValueError) as error:
        raise CommandFailedError(f"Ray Serve refuses the app: {error}", "change the app file") from error


def _require_macs(settings: AppConfig) -> None:
    """Raise CommandFailedError when a label that a model asks for is on no Mac: Serve would wait for it for ever."""
    nodes = living_nodes()
    for model in settings.models:
        if model.only_on is not None:
            wanted = label_resource(model.only_on)
            if not any(wanted in node["Resources"] for node in nodes):
                raise CommandFailedError(
                    f"Model `{model.name}` is to run only on Macs labelled `{model.only_on}`, and there is none.",
                    f"install one with `--label {model.only_on}`",
                )


def _require_listener(settings: AppConfig) -> None:
    """Raise CommandFailedError when nobody listens: Serve keeps the address that it was first started with."""
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    deadline_s = time.monotonic() + LISTEN_LIMIT_S
    while (reason := reach(host, settings.port)) is not None:
        if time.monotonic() > deadline_s:
            raise CommandFailedError(
                f"The app runs, but not at its address ({reason}): that was fixed when the fleet was started.",
                "start the head again: k8s-free-deploy/bin/drain.sh --stop, then --undo",
            )
        time.sleep(POLL_S)


def _deploy(settings: AppConfig) -> None:
    from serve_app.app import run_app
    from serve_app.cli.deploy import deploy as follow

    with progress("deploying") as update:
        follow(lambda: run_app(settings), update, Path("session_latest/logs in Ray's folder"))
