"""How every command speaks: facts on stdout, progress and errors on stderr, exit 0 / 1 / 2.

Owns: the consoles, the shape of an error (what happened, one fix) and the exit codes. Must not know: any command.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from engine.errors import ConfigError, EngineError, StartupError

EXIT_FAILED = 1
EXIT_USAGE = 2

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

P = ParamSpec("P")
R = TypeVar("R")


class CommandFailedError(StartupError):
    """A command could not do its work; ``fix`` is one thing that the person can do."""


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn typed errors into two lines and an exit code. METALSLOTS_DEBUG=1 lets the traceback through."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except EngineError as error:
            if os.environ.get("METALSLOTS_DEBUG") == "1":
                raise
            print_error(error)
            raise typer.Exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED) from error
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if os.environ.get("METALSLOTS_DEBUG") == "1":
                raise
            print_error(_described(error))
            raise typer.Exit(EXIT_FAILED) from error
        except KeyboardInterrupt:
            err.print("stopped")
            raise typer.Exit(130) from None

    return wrapped


def endpoint_of(url: str) -> str:
    """The endpoint's address, whether or not it was given as clients want it, with /v1."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _described(error: Exception) -> CommandFailedError:
    if isinstance(error, OSError) and error.filename:
        return CommandFailedError(
            f"{error.filename}: {error.strerror}.", "see that the path is right, and that you may write there"
        )
    cause = f"{type(error).__name__}: {error}"
    return CommandFailedError(cause, "a defect of ours; METALSLOTS_DEBUG=1 shows where it arose")


def print_error(error: EngineError) -> None:
    """Print what happened and, when there is one, the fix."""
    err.print(f"[bold red]error:[/] {error.message}", soft_wrap=True)
    fix = getattr(error, "fix", "")
    if fix:
        err.print(f"  [bold]fix:[/] {fix}", soft_wrap=True)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, uncoloured and unwrapped."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


@contextmanager
def progress(description: str) -> Iterator[Callable[[str, float | None], None]]:
    """Show a bar on a terminal and one line per change elsewhere.

    The yielded function takes a description and a fraction done in [0, 1], or None while that is unknown.
    """
    if not err.is_terminal:
        yield _line_progress(description)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(description, total=None)

        def update(text: str, fraction: float | None = None) -> None:
            total = None if fraction is None else 1.0
            bar.update(task, description=text, total=total, completed=fraction or 0.0)

        yield update


def _line_progress(first: str) -> Callable[[str, float | None], None]:
    shown = [first]
    err.print(f"... {first}")

    def update(text: str, fraction: float | None = None) -> None:
        if text != shown[0]:
            shown[0] = text
            err.print(f"... {text}")

    return update
