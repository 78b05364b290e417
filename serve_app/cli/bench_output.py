"""How bench results reach a person: tables on stdout, files in a folder. Must not know how they were measured."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import typer

from engine.errors import ConfigError
from serve_app.bench.document import RunDocument, to_json, write_document
from serve_app.bench.plan import BenchPlan, forecast
from serve_app.bench.plots import draw_all
from serve_app.bench.report import markdown_report, markdown_table, plan_table, verdict_lines
from serve_app.cli.console import EXIT_FAILED, out, print_json

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_FOLDER = "bench-results"


def results_folder(name: str) -> Path:
    """The folder for results. Asked for before anything is measured: an hour's figures must not be lost for it.

    Raises ConfigError when nothing can be written there.
    """
    folder = Path(name)
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"Results cannot be written to {folder}.", "name another folder with --out")
    return folder


def show_plan(plan: BenchPlan, as_json: bool) -> None:
    """Print what a plan will send."""
    if as_json:
        print_json({"workload": plan.workload.model_dump(), "loads": [asdict(each) for each in forecast(plan)]})
    else:
        out.print(plan_table(plan), soft_wrap=True)


def finish(
    documents: Sequence[RunDocument], folder: Path, *, title: str, plots: bool, strict: bool, as_json: bool
) -> None:
    """Write and show results. With ``strict`` figures that may not be quoted end with exit code 1."""
    report_path = write_results(documents, folder, title=title, plots=plots)
    if as_json:
        print_json([to_json(document) for document in documents])
    else:
        out.print(markdown_table(documents), soft_wrap=True, markup=False)
        for line in verdict_lines(documents):
            out.print(line, soft_wrap=True, markup=False)
        out.print(f"Written to {report_path} and the JSON beside it.", soft_wrap=True, markup=False)
    if strict and not all(document.verdict.valid for document in documents):
        raise typer.Exit(EXIT_FAILED)


def write_results(documents: Sequence[RunDocument], folder: Path, *, title: str, plots: bool) -> Path:
    """Write one JSON for each endpoint, one Markdown report and, if asked, pictures. Returns the report's path."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for document in documents:
        name = re.sub(r"[^\w.+-]+", "-", document.target.label)
        write_document(document, folder / f"{stamp}-{name}.json")
    report_path = folder / f"{stamp}.md"
    report_path.write_text(markdown_report(documents, title=title))
    if plots:
        draw_all(documents, folder, stamp)
    return report_path
