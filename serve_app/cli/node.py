"""`metalslots node`: what the scripts of k8s-free-deploy call to make a machine part of a fleet and to run it.

Owns: the commands' options. Must not know: launchd and systemd, which the scripts speak to.
"""

from __future__ import annotations

import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from engine.errors import ConfigError
from serve_app.cli.console import EXIT_FAILED, CommandFailedError, out, print_json, reports_errors
from serve_app.cli.findings import show_findings
from serve_app.files import write_file
from serve_app.node.daemon import NodeDaemon, read_state
from serve_app.node.installation_checks import check_installation
from serve_app.node.machine_checks import ask_system, check_machine
from serve_app.node.settings import (
    DEFAULT_FIRST_PORT,
    DEFAULT_HEAD_PORT,
    PREFIX_VARIABLE,
    Installation,
    load_settings,
)
from serve_app.node.ticket import make_head, make_member, read_ticket

POLL_S = 0.5

app = typer.Typer(help="Make this machine part of a fleet, and run it (see k8s-free-deploy).", no_args_is_help=True)

Prefix = Annotated[Path, typer.Option(envvar=PREFIX_VARIABLE, help="The folder of the installation.")]
Address = Annotated[str, typer.Option(help="This machine's address, which the others reach it at.")]
Labels = Annotated[list[str] | None, typer.Option("--label", help="What a model's `only_on` may ask for. Repeatable.")]
FirstPort = Annotated[int, typer.Option(help="Ray takes this port and the 999 after it.")]


@app.command("make-head")
@reports_errors
def head(
    prefix: Prefix,
    address: Address,
    port: Annotated[int, typer.Option(help="Port that the other machines come to.")] = DEFAULT_HEAD_PORT,
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt what the machines say to each other.")] = False,
    keep_state: Annotated[
        bool, typer.Option("--keep-state", help="Keep what the head's Ray knows on disk (alpha in Ray).")
    ] = False,
    label: Labels = None,
    first_port: FirstPort = DEFAULT_FIRST_PORT,
) -> None:
    """Write the head's settings, its secret, and the ticket that lets others join."""
    values = {"role": "head", "address": address, "head": f"{address}:{port}", "tls": tls, "keep_state": keep_state}
    settings = load_settings({**values, "labels": label or [], "first_port": first_port})
    installation = Installation(prefix)
    make_head(installation, settings)
    out.print(f"ticket for the others: {installation.ticket_file}", soft_wrap=True)


@app.command("make-member")
@reports_errors
def member(
    prefix: Prefix,
    address: Address,
    ticket: Annotated[Path, typer.Option(help="The file that the head's installation has made.", exists=True)],
    label: Labels = None,
    first_port: FirstPort = DEFAULT_FIRST_PORT,
) -> None:
    """Write a member's settings from the head's ticket."""
    settings = make_member(
        Installation(prefix), read_ticket(ticket), address=address, labels=label or [], first_port=first_port
    )
    out.print(f"{address} is a member of {settings.head}")


@app.command("run")
@reports_errors
def run(prefix: Prefix) -> None:
    """Hold this machine's Ray until SIGTERM. A supervisor starts this again when it fails."""
    NodeDaemon(Installation(prefix), Path(sys.executable)).run()


@app.command("state")
@reports_errors
def state(
    prefix: Prefix,
    wait_s: Annotated[float, typer.Option("--wait", help="Seconds to wait until Ray is up.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts as JSON.")] = False,
) -> None:
    """Say what this machine's daemon does. Exit 1 unless its Ray is up."""
    deadline_s = time.monotonic() + wait_s
    note = read_state(Installation(prefix))
    while (note is None or note["state"] != "running") and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        note = read_state(Installation(prefix))
    if as_json:
        print_json(note)
    elif note is None:
        out.print("the daemon does not run")
    else:
        out.print(f"{note['state']}: {note['detail']}", soft_wrap=True)
    if note is None or note["state"] != "running":
        raise typer.Exit(1)


@app.command("check")
@reports_errors
def check(
    prefix: Prefix, as_json: Annotated[bool, typer.Option("--json", help="Print facts as JSON.")] = False
) -> None:
    """Check this machine as a part of the fleet: daemon, secrets, sleep, network, clock. Exit 1 when one fails."""
    findings = [*check_installation(Installation(prefix)), *check_machine(ask_system, platform.system())]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        show_findings(findings)
    if any(finding.state == "fail" for finding in findings):
        raise typer.Exit(EXIT_FAILED)


@app.command("keep-app")
@reports_errors
def keep_app(
    prefix: Prefix,
    config: Annotated[Path, typer.Argument(help="An app file (configs/apps/*.yaml).", exists=True)],
) -> None:
    """Keep an app file as what the head deploys after each of its starts.

    It is kept whole, engines' files and all, so that nothing depends on where it came from.
    """
    import yaml

    from serve_app.config import read_app_config

    installation = Installation(prefix)
    if installation.read().role != "head":
        raise ConfigError("This machine is no head.", "keep the app on the head, which deploys it")
    settings = read_app_config(config)
    values = settings.model_dump(mode="json", exclude={"keys"}, exclude_defaults=True)
    if settings.keys_file is not None:
        values["keys_file"] = str((config.parent / settings.keys_file).resolve())
    write_file(installation.app_file, yaml.safe_dump(values, sort_keys=False))
    try:
        read_app_config(installation.app_file)
    except ConfigError as error:
        raise CommandFailedError(f"The kept file cannot be read again: {error.message}", error.fix) from error
    out.print(f"kept as {installation.app_file}", soft_wrap=True)
