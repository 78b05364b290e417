"""`metalslots bench peers` and `bench compare`: ours beside others. Must not know how that is measured."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from engine.errors import ConfigError
from serve_app.bench.compare import compare, comparison_table
from serve_app.bench.document import RunDocument, read_document
from serve_app.bench.peer_bench import PeerOptions, measure_peers
from serve_app.bench.peers import LLAMA_CPP, MLX_LM_FLAGS
from serve_app.bench.plan import BenchPlan
from serve_app.cli import bench_options as option
from serve_app.cli.bench_output import DEFAULT_FOLDER, finish, results_folder, show_plan
from serve_app.cli.console import out, print_json, progress, reports_errors
from serve_app.cli.trust import Authority, office_trust

MLX_LM = {"mlx-lm": "mlx_lm.server", "mlx-lm-tuned": "mlx_lm.server tuned"}
PEERS = {**MLX_LM, "llama.cpp": LLAMA_CPP}


@reports_errors
def peers(
    model: Annotated[str, typer.Option(help="demo, a folder, a .gguf file, or a Hugging Face id.")] = "demo",
    slots: Annotated[int, typer.Option(min=1, help="Slots of our endpoint.")] = 16,
    ours: Annotated[str | None, typer.Option(help="A running endpoint of ours, instead of starting one.")] = None,
    peer: Annotated[str, typer.Option("--peers", help=f"Servers to compare with: {', '.join(PEERS)}.")] = ",".join(
        MLX_LM
    ),
    authority: Authority = None,
    workload: option.WorkloadName = None,
    scale: option.Scale = 1.0,
    concurrency: option.Concurrency = "1,4,8,16",
    per_client: option.PerClient = 2,
    repeats: option.Repeats = 1,
    seed: option.Seed = "7",
    slo: option.SloText = "",
    max_level_s: option.MaxLevel = 600.0,
    max_total_s: option.MaxTotal = 3600.0,
    out_folder: option.OutFolder = DEFAULT_FOLDER,
    plots: option.Plots = False,
    strict: option.Strict = False,
    dry_run: option.DryRun = False,
    as_json: option.AsJson = False,
) -> None:
    """Measure our endpoint and others, by default mlx_lm.server (as it comes, and tuned), in turn on the same load."""
    plan = BenchPlan(
        workload=option.chosen_workload(workload, scale),
        levels=option.parse_levels(concurrency, ""),
        seed=seed,
        num_repeats=repeats,
        sessions_per_client=per_client,
        max_level_s=max_level_s,
        max_total_s=max_total_s,
        service_level=option.parse_slo(slo),
    )
    labels, trust = _labels(peer), office_trust(authority)
    if dry_run:
        show_plan(plan, as_json)
        return
    folder = results_folder(out_folder)
    options = PeerOptions(model, slots, ours, labels, folder / "logs", trust)
    with progress("starting") as report:
        documents = measure_peers(options, plan, report)
    finish(documents, folder, title="Bench beside peers", plots=plots, strict=strict, as_json=as_json)
    if not as_json:
        for other in documents[1:]:
            out.print("\n" + comparison_table(other, documents[0]), soft_wrap=True, markup=False)


def _labels(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ConfigError(f"`--peers` names {unknown[0]!r}.", f"use {' or '.join(PEERS)}")
    return tuple(PEERS[name] for name in names)


assert set(MLX_LM.values()) == set(MLX_LM_FLAGS)


@reports_errors
def compare_runs(
    a: Annotated[Path, typer.Argument(help="JSON of the run that is the measure.")],
    b: Annotated[Path, typer.Argument(help="JSON of the run that is measured against it.")],
    as_json: option.AsJson = False,
) -> None:
    """Set two runs of the same load side by side, request by request: every ratio is B / A."""
    first, second = read_document(a), read_document(b)
    if as_json:
        print_json({"a": first.target.label, "b": second.target.label, "levels": _as_values(first, second)})
    else:
        out.print(comparison_table(first, second), soft_wrap=True, markup=False)


def _as_values(a: RunDocument, b: RunDocument) -> list[dict[str, object]]:
    return [asdict(level) for level in compare(a, b)]
