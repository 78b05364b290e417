"""`metalslots deploy`, `drain` and `undrain`: the commands for an app on a Ray that runs already, on several machines.

Owns: joining that Ray, and naming its machines as people do. Must not know: how Ray's nodes are started
(k8s-free-deploy does that), or what is deployed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from serve_app.cli.console import CommandFailedError, err, out, print_json, progress, reports_errors
from serve_app.config import APP_NAME, AppConfig, ray_environment, read_app_config

POLL_S = 0.5
CALL_TIMEOUT_S = 30.0

Address = Annotated[str, typer.Option(help="Ray's address; `auto` on a machine that belongs to it.")]
TokenFile = Annotated[
    Path | None, typer.Option(envvar="RAY_AUTH_TOKEN_PATH", help="File with the fleet's secret.", exists=True)
]


@reports_errors
def deploy(
    config: Annotated[Path, typer.Argument(help="An app file (configs/apps/*.yaml).", exists=True)],
    address: Address = "auto",
    token_file: TokenFile = None,
    check: Annotated[bool, typer.Option("--check", help="Only say whether the file is right.")] = False,
    if_needed: Annotated[bool, typer.Option("--if-needed", help="Do nothing when an app runs already.")] = False,
) -> None:
    """Deploy an app file on a running fleet, or update it there, one Mac at a time."""
    settings = read_app_config(config)
    _check_schema(settings)
    if check:
        out.print(f"{config}: {', '.join(model.name for model in settings.models)} on port {settings.port}")
        return
    with _joined(address, token_file):
        if if_needed and _runs():
            out.print("the app runs already")
            return
        _deploy(settings)
    out.print(f"deployed: {', '.join(model.name for model in settings.models)} on port {settings.port} of every Mac")


@reports_errors
def drain(
    node: Annotated[str, typer.Argument(help="The Mac: its name, its address, or the beginning of its Ray node id.")],
    address: Address = "auto",
    token_file: TokenFile = None,
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds to wait for the answers that run there.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts as JSON.")] = False,
) -> None:
    """Give a Mac nothing new, and wait until what it answers is answered. Exit 1 when that takes longer."""
    with _joined(address, token_file):
        found = _find_node(node)
        statuses = _set_draining(found, True)
        deadline_s = time.monotonic() + wait_s
        while any(status.num_open_calls for status in statuses) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            statuses = _set_draining(found, True)
    num_open = sum(status.num_open_calls for status in statuses)
    if as_json:
        print_json({"node_id": found, "replicas": len(statuses), "open_calls": num_open})
    else:
        out.print(f"{node} takes nothing new; {num_open} answers still run there")
    if num_open:
        raise typer.Exit(1)


@reports_errors
def undrain(
    node: Annotated[str, typer.Argument(help="The Mac: its name, its address, or the beginning of its Ray node id.")],
    address: Address = "auto",
    token_file: TokenFile = None,
) -> None:
    """Let a drained Mac take requests again."""
    with _joined(address, token_file):
        _set_draining(_find_node(node), False)
    out.print(f"{node} takes requests again")


@contextmanager
def _joined(address: str, token_file: Path | None) -> Iterator[None]:
    # Ray reads them when it is first imported, which is below.
    os.environ.update(ray_environment())
    if token_file is not None:
        os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)})
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise CommandFailedError(
            f"There is no Ray at {address}: {error}",
            "run this on a Mac of the fleet, and see `k8s-free-deploy/README.md`",
        ) from error
    try:
        yield
    finally:
        leave: Any = ray.shutdown
        leave()


def _check_schema(settings: AppConfig) -> None:
    """Let Serve validate what would be deployed, before anything is changed. Raises CommandFailedError."""
    os.environ.update(ray_environment())
    from serve_app.app import build_app

    try:
        build_app(settings)
    except (TypeError, ValueError) as error:
        raise CommandFailedError(f"Ray Serve refuses the app: {error}", "change the app file") from error


def _deploy(settings: AppConfig) -> None:
    from serve_app.app import run_app
    from serve_app.cli.deploy import deploy as follow

    with progress("deploying") as update:
        follow(lambda: run_app(settings), update, Path("session_latest/logs in Ray's folder"))


def _runs() -> bool:
    from ray import serve

    application = serve.status().applications.get(APP_NAME)
    return application is not None and application.status == "RUNNING"


def _find_node(wanted: str) -> str:
    """Return the id of the one living node called ``wanted``. Raises CommandFailedError with those there are."""
    import ray

    list_nodes: Any = ray.nodes
    nodes: Sequence[Mapping[str, Any]] = [node for node in list_nodes() if node["Alive"]]
    found = [
        node["NodeID"]
        for node in nodes
        if wanted in (node["NodeManagerHostname"], node["NodeManagerAddress"])
        or (len(wanted) >= 4 and str(node["NodeID"]).startswith(wanted))
    ]
    if len(found) != 1:
        known = ", ".join(f"{n['NodeManagerHostname']} ({n['NodeManagerAddress']}, {n['NodeID'][:8]})" for n in nodes)
        what = "No Mac of the fleet is" if not found else f"{len(found)} Macs of the fleet are"
        raise CommandFailedError(f"{what} called `{wanted}`. There are: {known}.", "name one of them by its address")
    return str(found[0])


def _set_draining(node_id: str, draining: bool) -> list[Any]:
    """Tell the replicas on a node; returns what they say of themselves."""
    from ray import serve

    try:
        ingress: Any = serve.get_app_handle(APP_NAME)
    except Exception as error:
        raise CommandFailedError(f"The app does not run: {error}", "deploy one: `metalslots deploy FILE`") from error
    deployments = set(ingress.deployments.remote().result(timeout_s=CALL_TIMEOUT_S).values())
    statuses = []
    for name in deployments:
        handle: Any = serve.get_deployment_handle(name, APP_NAME)
        broadcast = handle.broadcast("set_draining", node_id, draining)
        for answer in broadcast.results(timeout_s=CALL_TIMEOUT_S, return_exceptions=True):
            if isinstance(answer, BaseException):
                err.print(f"a replica did not answer: {answer}", soft_wrap=True)
            elif answer is not None:
                statuses.append(answer)
    return statuses
