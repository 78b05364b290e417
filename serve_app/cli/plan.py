"""`metalslots plan`: how many Macs an office needs. Must not know how that is found out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serve_app.capacity.chart import draw_options
from serve_app.capacity.planner import Option, Planner, sensitivity
from serve_app.cli import plan_check
from serve_app.cli import plan_options as options
from serve_app.cli.console import out, print_json, progress, reports_errors
from serve_app.cli.default_command import group_with_default
from serve_app.cli.plan_output import assumptions, plan_text, plan_values

app = typer.Typer(cls=group_with_default("fleet"), help="Plan a fleet (without a command: `fleet`).")
app.command("check")(plan_check.check)


@app.command("fleet")
@reports_errors
def plan(
    people: Annotated[int, typer.Option(min=1, help="People in the office.")] = 100,
    calls_per_person: Annotated[float, typer.Option(min=0, help="Calls of each in the busiest hour.")] = 5.0,
    calls_per_hour: Annotated[float | None, typer.Option(min=0, help="Calls in that hour, instead of both.")] = None,
    peak_factor: Annotated[float, typer.Option(min=0.1, help="Peak rate inside that hour over its mean.")] = 1.5,
    prompts: Annotated[str, typer.Option(help="Prompt tokens with their shares.")] = "6000:0.75,24000:0.25",
    output_mean: Annotated[float, typer.Option(min=1, help="Mean answer in tokens.")] = 700.0,
    output_cv: Annotated[float, typer.Option(min=0, help="Its coefficient of variation (lognormal).")] = 0.6,
    workload: Annotated[str | None, typer.Option(help="A workload file instead: sessions, agents, prefixes.")] = None,
    profile: Annotated[Path | None, typer.Option(help="A measured machine (`metalslots bench profile`).")] = None,
    estimate: options.Estimate = None,
    prefill_rate: Annotated[float, typer.Option(min=0.1, help="By hand: prompt tokens per second.")] = 3000.0,
    decode_rate: Annotated[float, typer.Option(min=0.1, help="By hand: tokens per second of one answer.")] = 100.0,
    batch_gain: Annotated[str, typer.Option(help="By hand: total speed of 1, 2, ... answers.")] = "1,1.7,2.0,2.25",
    decode_share: options.DecodeShare = None,
    macs: Annotated[int | None, typer.Option(min=1, max=10_000, help="Judge this many; else find the fewest.")] = None,
    slots: Annotated[str, typer.Option(help="Slots to try; auto is what the engine would choose.")] = "1,2,4,8",
    spare: Annotated[int, typer.Option(min=0, help="Machines to buy besides the working ones.")] = 1,
    slo: options.Slo = options.DEFAULT_SLO,
    routing: Annotated[str, typer.Option(help="central: one line. router: ours. pinned: no moves.")] = "central",
    calls: Annotated[int | None, typer.Option(min=200, max=5_000_000, help="Calls in a run; else chosen.")] = None,
    seed: Annotated[str, typer.Option(help="The same seed gives the same answer.")] = "7",
    what_if: Annotated[bool, typer.Option("--what-if", help="Also: prompts double, calls double, one fails.")] = False,
    chart: Annotated[Path | None, typer.Option(help="Draw the options into this PNG or SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Find the fewest Macs that answer an office well enough, for several numbers of slots."""
    asked = options.DemandOptions(
        people, calls_per_person, calls_per_hour, peak_factor, prompts, output_mean, output_cv, workload
    )
    rates = options.MachineOptions(profile, estimate, prefill_rate, decode_rate, batch_gain, decode_share)
    machine = options.machine_of(rates)
    settings = options.settings_of(slo, routing, calls, seed)
    planner = Planner(options.demand_of(asked), machine, settings)
    found = _options(planner, macs, options.slot_counts(slots, machine, estimate))
    changes = [(each.slots, list(sensitivity(planner, each))) for each in found if what_if and each.stable]
    notes = assumptions(planner, routing, spare)
    if chart is not None:
        draw_options(found, chart)
    if as_json:
        print_json(plan_values(found, changes, notes, spare))
    else:
        out.print(plan_text(found, changes, notes, spare), soft_wrap=True, markup=False)


def _options(planner: Planner, macs: int | None, counts: tuple[int, ...]) -> list[Option]:
    found = []
    with progress("simulating") as report:
        for number, slots in enumerate(counts):
            report(f"{slots} slots", number / len(counts))
            found.append(planner.smallest(slots) if macs is None else planner.option(macs, slots))
    return found
