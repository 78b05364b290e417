"""`metalslots bench`: load tests of an endpoint. Must not know how they work, only how a person asks for them."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from serve_app.bench.document import read_document
from serve_app.bench.plan import BenchPlan
from serve_app.bench.plots import draw_all
from serve_app.bench.report import self_check_text
from serve_app.bench.self_check import check_client
from serve_app.bench.session import measure, token_counter
from serve_app.bench.target import EosBan, Target
from serve_app.cli import bench_options as option
from serve_app.cli import bench_peers, bench_profile, bench_sweep
from serve_app.cli.bench_output import DEFAULT_FOLDER, DEFAULT_URL, finish, results_folder, show_plan
from serve_app.cli.console import EXIT_FAILED, endpoint_of, out, print_json, progress, reports_errors
from serve_app.cli.default_command import group_with_default
from serve_app.cli.trust import Authority, office_trust

app = typer.Typer(
    cls=group_with_default("run"), help="Load-test an OpenAI-compatible endpoint (`run` is meant when none is named)."
)


@app.command("run")
@reports_errors
def run(
    url: option.Url = DEFAULT_URL,
    workload: option.WorkloadName = None,
    scale: option.Scale = 1.0,
    concurrency: option.Concurrency = "1,4,8,16",
    rate: Annotated[str, typer.Option(help="Open loop instead: Poisson arrivals per second, one level each.")] = "",
    per_client: option.PerClient = 4,
    sessions: Annotated[int, typer.Option(min=1, help="Open loop: sessions of a level.")] = 64,
    repeats: option.Repeats = 1,
    seed: option.Seed = "7",
    slo: option.SloText = "",
    model: Annotated[str, typer.Option(help="Model to ask for; by default the only one offered.")] = "",
    tokenizer: option.Tokenizer = None,
    ban_eos: Annotated[EosBan, typer.Option(help="How the server is kept from short answers.")] = EosBan.IGNORE_EOS,
    slots: Annotated[int | None, typer.Option(min=1, help="Slots meant to be used; checked with /status.")] = None,
    check_answers: Annotated[int, typer.Option(min=0, max=100, help="Answers to compare with a solo run.")] = 2,
    max_level_s: option.MaxLevel = 600.0,
    max_total_s: option.MaxTotal = 3600.0,
    label: Annotated[str, typer.Option(help="Name of this run in tables and files.")] = "run",
    out_folder: option.OutFolder = DEFAULT_FOLDER,
    key: option.ApiKey = None,
    authority: Authority = None,
    allow_remote: option.AllowRemote = False,
    plots: option.Plots = False,
    strict: option.Strict = False,
    dry_run: option.DryRun = False,
    as_json: option.AsJson = False,
) -> None:
    """Measure throughput and latency level by level, and say whether the figures may be quoted."""
    plan = BenchPlan(
        workload=option.chosen_workload(workload, scale),
        levels=option.parse_levels(concurrency, rate),
        seed=seed,
        num_repeats=repeats,
        sessions_per_client=per_client,
        num_sessions=sessions,
        num_answers_checked=check_answers,
        max_level_s=max_level_s,
        max_total_s=max_total_s,
        service_level=option.parse_slo(slo),
    )
    if dry_run:
        show_plan(plan, as_json)
        return
    folder = results_folder(out_folder)
    count_tokens, eos_token_ids = token_counter(tokenizer)
    target = Target(label, endpoint_of(url), model, ban_eos, eos_token_ids, key, slots, trust=office_trust(authority))
    with progress("connecting") as report:
        documents = measure([target], plan, count_tokens=count_tokens, report=report, allow_remote=allow_remote)
    finish(documents, folder, title=f"Bench of {label}", plots=plots, strict=strict, as_json=as_json)


@app.command("plot")
@reports_errors
def plot(
    results: Annotated[list[Path], typer.Argument(help="JSON of one run, or of several to set side by side.")],
    out_folder: option.OutFolder = DEFAULT_FOLDER,
) -> None:
    """Draw pictures of runs that were made before."""
    documents = [read_document(path) for path in results]
    for path in draw_all(documents, Path(out_folder), results[0].stem):
        out.print(str(path), soft_wrap=True, markup=False)


@app.command("check-client")
@reports_errors
def check(
    events_per_s: Annotated[float, typer.Option(min=1, max=20_000, help="Token events per second.")] = 2000.0,
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="How long.")] = 5.0,
    as_json: option.AsJson = False,
) -> None:
    """Measure the bench itself against a server with known timing."""
    with progress(f"{events_per_s:.0f} events/s for {seconds:.0f} s"):
        result = asyncio.run(check_client(events_per_s, seconds))
    if as_json:
        print_json(asdict(result))
    else:
        out.print(self_check_text(result), soft_wrap=True, markup=False)
    if not result.passed:
        raise typer.Exit(EXIT_FAILED)


app.command("sweep")(bench_sweep.sweep)
app.command("profile")(bench_profile.profile)
app.command("peers")(bench_peers.peers)
app.command("compare")(bench_peers.compare_runs)
