"""A command's place in a Ray that runs already, and the questions it asks there.

Owns: joining that Ray with its secret, naming its machines as people do, and speaking to the replicas of one machine.
Must not know: how Ray's nodes are started, or what is deployed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve_app.cli.console import CommandFailedError, err
from serve_app.config import APP_NAME, ray_environment
from serve_app.node.machine_checks import reach
from serve_app.node.settings import Installation

CALL_TIMEOUT_S = 30.0
OWN_RAY = "auto"


@contextmanager
def joined(address: str, token_file: Path | None) -> Iterator[None]:
    """Be a part of the Ray at ``address``; `auto` is the one that this machine's installation belongs to.

    Raises CommandFailedError when there is none.
    """
    address, own = set_environment(address, token_file)
    _require_reachable(address)
    # Serve sets its loggers' levels itself, so a level of ours would not last.
    logging.disable(logging.WARNING)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, RuntimeError) as error:
        raise CommandFailedError(
            f"There is no Ray at {address}: {error}",
            "run this on a Mac of the fleet, and see `k8s-free-deploy/README.md`",
        ) from error
    try:
        yield
    finally:
        leave: Any = ray.shutdown
        leave()


def _require_reachable(address: str) -> None:
    """Ray itself would try for two minutes, and say so in its own words."""
    host, found, port = address.rpartition(":")
    if not found or not port.isdigit() or "/" in host:
        return
    if (reason := reach(host, int(port))) is not None:
        raise CommandFailedError(f"There is no Ray at {address}: {reason}.", "see that the head runs, and its address")


def set_environment(address: str, token_file: Path | None) -> tuple[str, dict[str, Any]]:
    """Set what Ray reads when it is first imported. Returns Ray's address and further arguments of ``ray.init``."""
    os.environ.update(ray_environment())
    installation = Installation.here()
    if installation is not None and address == OWN_RAY:
        settings = installation.read()
        os.environ.update(installation.environment(settings))
        return settings.head, {"_node_ip_address": settings.address}
    if token_file is not None:
        os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)})
    return address, {}


def app_runs() -> bool:
    """Whether the app is deployed with everything that it wants."""
    from ray import serve

    application = serve.status().applications.get(APP_NAME)
    return application is not None and application.status == "RUNNING"


def find_node(wanted: str) -> str:
    """Return the id of the one living node called ``wanted``. Raises CommandFailedError with those there are."""
    nodes = living_nodes()
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


def living_nodes() -> Sequence[Mapping[str, Any]]:
    """Ray's nodes that are alive."""
    import ray

    list_nodes: Any = ray.nodes
    return [node for node in list_nodes() if node["Alive"]]


def set_draining(node_id: str, draining: bool) -> list[Any]:
    """Tell the replicas on a node; returns what they say of themselves."""
    return [status for status in ask_replicas("set_draining", node_id, draining) if status is not None]


def ask_replicas(method: str, *arguments: object) -> list[Any]:
    """Call a method of every replica of every model; returns the answers, and prints who gave none.

    Without an app there are none. Raises CommandFailedError when the app does not answer.
    """
    from ray import serve

    if APP_NAME not in serve.status().applications:
        return []
    try:
        ingress: Any = serve.get_app_handle(APP_NAME)
        deployments = set(ingress.deployments.remote().result(timeout_s=CALL_TIMEOUT_S).values())
    except Exception as error:
        raise CommandFailedError(
            f"The app does not answer: {error}", "try again; read the logs in Ray's folder"
        ) from error
    answers = []
    for name in deployments:
        handle: Any = serve.get_deployment_handle(name, APP_NAME)
        broadcast = handle.broadcast(method, *arguments)
        for answer in broadcast.results(timeout_s=CALL_TIMEOUT_S, return_exceptions=True):
            if isinstance(answer, BaseException):
                err.print(f"a replica did not answer: {answer}", soft_wrap=True)
            else:
                answers.append(answer)
    return answers
