"""`metalslots bench sweep`: the highest rate that keeps a service level. Must not know how it is searched for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from engine.errors import ConfigError
from serve_app.bench.plan import BenchPlan, Level
from serve_app.bench.session import measure_sweep, token_counter
from serve_app.bench.sweep import Search, sweep_table
from serve_app.bench.target import EosBan, Target
from serve_app.cli import bench_options as option
from serve_app.cli.bench_output import DEFAULT_FOLDER, DEFAULT_URL, results_folder, write_results
from serve_app.cli.console import endpoint_of, out, print_json, progress, reports_errors
from serve_app.cli.trust import Authority, office_trust


@reports_errors
def sweep(
    slo: option.SloText,
    url: option.Url = DEFAULT_URL,
    start: Annotated[float, typer.Option(min=0.001, help="First rate to try, in sessions per second.")] = 0.25,
    highest: Annotated[float, typer.Option(min=0.001, help="No rate above this is tried.")] = 64.0,
    attainment: Annotated[float, typer.Option(min=0.5, max=1, help="Share of requests that must be in bounds.")] = 0.95,
    resolution: Annotated[float, typer.Option(min=0.01, max=0.5, help="Stop when rates are this close.")] = 0.1,
    workload: option.WorkloadName = None,
    scale: option.Scale = 1.0,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions sent at each rate, at least.")] = 64,
    min_load_s: Annotated[float, typer.Option(min=0, help="Send more when they would arrive in less time.")] = 60.0,
    seed: option.Seed = "7",
    model: Annotated[str, typer.Option(help="Model to ask for; by default the only one offered.")] = "",
    tokenizer: option.Tokenizer = None,
    ban_eos: Annotated[EosBan, typer.Option(help="How the server is kept from short answers.")] = EosBan.IGNORE_EOS,
    max_level_s: option.MaxLevel = 300.0,
    max_total_s: option.MaxTotal = 3600.0,
    label: Annotated[str, typer.Option(help="Name of this run in tables and files.")] = "sweep",
    out_folder: option.OutFolder = DEFAULT_FOLDER,
    key: option.ApiKey = None,
    authority: Authority = None,
    allow_remote: option.AllowRemote = False,
    as_json: option.AsJson = False,
) -> None:
    """Find the highest Poisson rate at which the share of requests within --slo is still kept."""
    plan = BenchPlan(
        workload=option.chosen_workload(workload, scale),
        levels=(Level(rate_per_s=start),),
        seed=seed,
        num_sessions=sessions,
        min_load_s=min_load_s,
        max_level_s=max_level_s,
        max_total_s=max_total_s,
        service_level=option.parse_slo(slo),
    )
    if plan.service_level.is_open:
        raise ConfigError("`--slo` is empty.", "write bounds such as ttft:3000,tpot:150")
    folder = results_folder(out_folder)
    count_tokens, eos_token_ids = token_counter(tokenizer)
    target = Target(label, endpoint_of(url), model, ban_eos, eos_token_ids, key, trust=office_trust(authority))
    search = Search(start, highest, resolution, attainment)
    with progress("connecting") as report:
        found, document = measure_sweep(
            target, plan, search, count_tokens=count_tokens, report=report, allow_remote=allow_remote
        )
    write_results([document], folder, title=f"Sweep of {label}", plots=False)
    if as_json:
        print_json(asdict(found))
    else:
        out.print(sweep_table(found, plan.service_level), soft_wrap=True, markup=False)
