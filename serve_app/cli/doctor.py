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
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer
from rich.table import Table

from engine.errors import EngineError
from serve_app.cli.console import EXIT_FAILED, err, out, print_json, progress, reports_errors
from serve_app.cli.serve_checks import check_disk, check_port

State = Literal["pass", "warn", "fail", "skip"]
ENGINE_CHECKS = "engine.mlx_backend.selfcheck"
ENGINE_CHECKS_TIMEOUT_S = 300
_MARKS: dict[State, str] = {
    "pass": "[green]pass[/]",
    "warn": "[yellow]warn[/]",
    "fail": "[bold red]FAIL[/]",
    "skip": "skip",
}
_PACKAGES = ("ray", "mlx", "mlx-lm", "transformers", "numpy")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    state: State
    detail: str
    fix: str = ""


@reports_errors
def doctor(
    model: Annotated[str, typer.Option(help="The model to load for the engine's checks.")] = "demo",
    port: Annotated[int, typer.Option(help="The port that `serve` would use.")] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check this machine: versions, memory, port, disk, and the engine on the given model.

    Ends with one line, pass or fail, and exit code 0 or 1. Nothing is changed.
    """
    checks = [*_machine_checks(), *_serve_checks(port), *_engine_checks(model)]
    failed = [check for check in checks if check.state == "fail"]
    if as_json:
        print_json({"passed": not failed, "checks": [asdict(check) for check in checks]})
    else:
        _show(checks)
        verdict = "[bold red]fail[/]: " + ", ".join(check.name for check in failed) if failed else "[bold green]pass[/]"
        out.print(f"\nmetalslots doctor: {verdict}")
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _show(checks: list[Check]) -> None:
    table = Table(box=None, padding=(0, 1))
    for column in ("check", "", "what was found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        detail = f"{check.detail}\n[dim]fix: {check.fix}[/]" if check.fix and check.state != "pass" else check.detail
        table.add_row(check.name, _MARKS[check.state], detail)
    out.print(table)


def _machine_checks() -> Iterator[Check]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() == "Darwin":
        system = f"macOS {platform.mac_ver()[0]} {platform.machine()}"
    yield Check("system", "pass", f"{system}, Python {platform.python_version()}, {os.cpu_count()} cores")
    yield Check("versions", "pass", ", ".join(f"{name} {_version(name)}" for name in ("metalslots", *_PACKAGES)))
    memory = psutil.virtual_memory()
    yield Check("memory", "pass", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _serve_checks(port: int) -> Iterator[Check]:
    try:
        check_port("127.0.0.1", port)
        yield Check("port", "pass", f"127.0.0.1:{port} is free")
    except EngineError as error:
        # A running metalslots holds the port rightly, so a taken port alone does not fail the machine.
        yield Check("port", "warn", error.message, getattr(error, "fix", ""))
    folder = Path(tempfile.gettempdir())
    try:
        check_disk(folder)
        yield Check("disk", "pass", f"{folder} has room for logs and sockets")
    except EngineError as error:
        yield Check("disk", "fail", error.message, getattr(error, "fix", ""))


def _engine_checks(model: str) -> Iterator[Check]:
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
            yield Check(found["name"], found["state"], found["detail"], found.get("fix", ""))
    if child.returncode not in (0, 1):
        err.print(errors.strip()[-2000:], markup=False)
        yield Check("engine", "fail", f"the engine's checks ended with code {child.returncode}", "read the lines above")
