"""`metalslots doctor`: proves, on this machine, what can only be proved there.

Owns: the list of checks and how they are shown. Must not know: MLX. The engine's checks run in a process of their own
(`python -m engine.mlx_backend.selfcheck`), because a failing GPU may abort the process that asks.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import psutil
import typer

from engine.errors import EngineError
from serve_app.cli.console import EXIT_FAILED, err, out, print_json, progress, reports_errors
from serve_app.cli.findings import show_findings
from serve_app.cli.serve_checks import check_disk, check_port
from serve_app.node.installation_checks import check_installation
from serve_app.node.machine_checks import Finding, ask_system, check_machine
from serve_app.node.settings import Installation

ENGINE_CHECKS = "engine.mlx_backend.selfcheck"
ENGINE_CHECKS_TIMEOUT_S = 300
_PACKAGES = ("ray", "mlx", "mlx-lm", "transformers", "numpy")


@reports_errors
def doctor(
    model: Annotated[str, typer.Option(help="The model to load for the engine's checks.")] = "demo",
    port: Annotated[int, typer.Option(help="The port that `serve` would use.", min=1, max=65535)] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check this machine: versions, memory, sleep, network, clock, port, disk, and the engine on the given model.

    Ends with one line, pass or fail, and exit code 0 or 1. Nothing is changed.
    """
    checks = [*_machine_checks(), *_fleet_checks(), *_serve_checks(port), *_engine_checks(model)]
    failed = [check for check in checks if check.state == "fail"]
    if as_json:
        print_json({"passed": not failed, "checks": [asdict(check) for check in checks]})
    else:
        show_findings(checks)
        verdict = "[bold red]fail[/]: " + ", ".join(check.name for check in failed) if failed else "[bold green]pass[/]"
        out.print(f"\nmetalslots doctor: {verdict}")
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _machine_checks() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() == "Darwin":
        system = f"macOS {platform.mac_ver()[0]} {platform.machine()}"
    yield Finding("system", "pass", f"{system}, Python {platform.python_version()}, {os.cpu_count()} cores")
    yield Finding("versions", "pass", ", ".join(f"{name} {_version(name)}" for name in ("metalslots", *_PACKAGES)))
    memory = psutil.virtual_memory()
    yield Finding("memory", "pass", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available")


def _fleet_checks() -> Iterator[Finding]:
    yield from check_machine(ask_system, platform.system())
    installation = Installation.here()
    if installation is not None:
        yield from check_installation(installation)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _serve_checks(port: int) -> Iterator[Finding]:
    try:
        check_port("127.0.0.1", port)
        yield Finding("port", "pass", f"127.0.0.1:{port} is free")
    except EngineError as error:
        # A running metalslots holds the port rightly, so a taken port alone does not fail the machine.
        yield Finding("port", "warn", error.message, getattr(error, "fix", ""))
    folder = Path(tempfile.gettempdir())
    try:
        check_disk(folder)
        yield Finding("disk", "pass", f"{folder} has room for logs and sockets")
    except EngineError as error:
        yield Finding("disk", "fail", error.message, getattr(error, "fix", ""))


def _engine_checks(model: str) -> Iterator[Finding]:
    command = [sys.executable, "-m", ENGINE_CHECKS, "--model", model]
    with progress("engine checks") as update:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            text, errors = child.communicate(timeout=ENGINE_CHECKS_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.terminate()
            text, errors = child.communicate()
            errors += f"\nno answer within {ENGINE_CHECKS_TIMEOUT_S} s"
        except BaseException:
            child.terminate()
            child.wait()
            raise
        update("engine checks done", 1.0)
    for line in text.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            yield Finding(found["name"], found["state"], found["detail"], found.get("fix", ""))
    if child.returncode not in (0, 1):
        err.print(errors.strip()[-2000:], markup=False)
        yield Finding(
            "engine", "fail", f"the engine's checks ended with code {child.returncode}", "read the lines above"
        )
