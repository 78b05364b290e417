"""`metalslots keys`: who may ask, and how much.

Owns: the three commands. Must not know: how keys are checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from serve_app.cli.console import out, print_json, reports_errors
from serve_app.cli.serve_settings import DEFAULT_KEYS_FILE
from serve_app.keys import add_key, read_keys, remove_key

app = typer.Typer(
    help="Make, list and remove API keys. A running endpoint reads them when it starts.", no_args_is_help=True
)
KeysFile = Annotated[Path, typer.Option("--file", envvar="METALSLOTS_KEYS_FILE", help="The keys file.")]
Name = Annotated[str, typer.Argument(help="Person or program: letters, digits, and . _ @ -")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command("add")
@reports_errors
def add(
    name: Name,
    file: KeysFile = Path(DEFAULT_KEYS_FILE),
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Requests a minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Prompt and answer tokens a minute.")] = None,
    max_parallel: Annotated[int | None, typer.Option(min=1, help="Requests at the same time.")] = None,
    priority: Annotated[int, typer.Option(min=-100, max=100, help="Lower runs first.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, once: only its hash is kept."""
    text = add_key(
        file,
        name,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_parallel=max_parallel,
        priority=priority,
    )
    if as_json:
        print_json({"name": name, "key": text, "file": str(file)})
    else:
        out.print(text, soft_wrap=True)


@app.command("list")
@reports_errors
def list_keys(file: KeysFile = Path(DEFAULT_KEYS_FILE), as_json: AsJson = False) -> None:
    """List the keys' names and limits."""
    rows = [key.model_dump(exclude={"sha256"}) for key in read_keys(file)]
    if as_json:
        print_json({"keys": rows})
        return
    table = Table("name", "requests/min", "tokens/min", "parallel", "priority", box=None)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    out.print(table)


@app.command("remove")
@reports_errors
def remove(name: Name, file: KeysFile = Path(DEFAULT_KEYS_FILE)) -> None:
    """Take a key away."""
    remove_key(file, name)
    out.print(f"{name} is removed from {file}", soft_wrap=True)
