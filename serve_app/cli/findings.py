"""How findings about a machine are shown. Owns: the table. Must not know: what is looked at."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from serve_app.cli.console import out
from serve_app.node.machine_checks import Finding, State

_MARKS: dict[State, str] = {
    "pass": "[green]pass[/]",
    "warn": "[yellow]warn[/]",
    "fail": "[bold red]FAIL[/]",
    "skip": "skip",
}


def show_findings(findings: Sequence[Finding]) -> None:
    """Print one line for each, and the fix below what has not passed."""
    table = Table(box=None, padding=(0, 1))
    for column in ("check", "", "what was found"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        fix = f"\n[dim]fix: {finding.fix}[/]" if finding.fix and finding.state != "pass" else ""
        table.add_row(finding.name, _MARKS[finding.state], finding.detail + fix)
    out.print(table)
