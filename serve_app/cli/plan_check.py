"""`metalslots plan check`: what the planner would have said of a load that was really sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from serve_app.bench.document import RunDocument, read_document
from serve_app.bench.errors import BenchError
from serve_app.bench.prompts import TokenCounter
from serve_app.bench.session import measure, token_counter
from serve_app.bench.target import EosBan, Target
from serve_app.capacity.check import Comparison, compare, predict
from serve_app.capacity.dispatch import Dispatch
from serve_app.capacity.profile import MachineProfile, read_profile
from serve_app.capacity.simulator import Load
from serve_app.cli import bench_options as option
from serve_app.cli.bench_output import DEFAULT_FOLDER, results_folder, write_results
from serve_app.cli.console import endpoint_of, out, print_json, progress, reports_errors
from serve_app.cli.plan_options import dispatch_of
from serve_app.cli.trust import Authority, office_trust

Checked = tuple[str, tuple[Comparison, ...]]


@reports_errors
def check(
    recorded: Annotated[Path, typer.Argument(help="JSON of a bench run in an open loop (`bench --rate`).")],
    profile: Annotated[Path, typer.Option(help="The machine's profile (`metalslots bench profile`).")],
    macs: Annotated[int, typer.Option(min=1, help="Replicas behind the endpoint.")] = 1,
    slots: Annotated[int, typer.Option(min=1, help="Slots of each.")] = 4,
    routing: Annotated[str, typer.Option(help="How calls found them. router: ours. central: one line.")] = "router",
    url: Annotated[str | None, typer.Option(help="Send the recorded load again, to this endpoint.")] = None,
    tokenizer: option.Tokenizer = None,
    out_folder: option.OutFolder = DEFAULT_FOLDER,
    key: option.ApiKey = None,
    authority: Authority = None,
    allow_remote: option.AllowRemote = False,
    as_json: option.AsJson = False,
) -> None:
    """Set the planner's prediction beside a measurement of the same sessions at the same moments."""
    dispatch = dispatch_of(routing)
    document = read_document(recorded)
    if url is not None:
        folder, replayed = results_folder(out_folder), document.target
        count_tokens, eos_token_ids = token_counter(tokenizer)
        target = Target(
            "replay",
            endpoint_of(url),
            replayed.model,
            EosBan(replayed.eos_ban),
            eos_token_ids,
            key,
            trust=office_trust(authority),
        )
        document = _replayed(document, target, count_tokens, allow_remote)
        write_results([document], folder, title="Replay", plots=False)
    checked = list(_check(document, read_profile(profile), macs, slots, dispatch))
    if not checked:
        raise BenchError("The run has no level in an open loop.", "record one with `metalslots bench --rate`")
    if as_json:
        print_json([_values(level, rows) for level, rows in checked])
    else:
        out.print(_table(checked), soft_wrap=True, markup=False)


def _replayed(
    document: RunDocument, target: Target, count_tokens: TokenCounter | None, allow_remote: bool
) -> RunDocument:
    with progress("connecting") as report:
        (measured,) = measure(
            [target], document.plan, count_tokens=count_tokens, report=report, allow_remote=allow_remote
        )
    return measured


def _check(
    document: RunDocument, profile: MachineProfile, macs: int, slots: int, dispatch: Callable[[], Dispatch]
) -> Iterator[Checked]:
    for run in document.runs:
        rate_per_s = run.level.rate_per_s
        measured = [call.timing for call in run.result.calls if call.timing is not None]
        if rate_per_s is None or not measured:
            continue
        load = Load(document.plan.workload, rate_per_s, document.plan.sessions_of(run.level), run.seed, 0.0)
        title = str(run.level) + (f", run {run.repeat + 1}" if document.plan.num_repeats > 1 else "")
        yield title, compare(measured, predict(load, profile, macs, slots, dispatch()))


def _values(level: str, rows: tuple[Comparison, ...]) -> dict[str, Any]:
    figures = [
        {
            "figure": row.figure,
            "measured_s": round(row.measured_s, 4),
            "predicted_s": round(row.predicted_s, 4),
            "error": round(row.error, 4),
        }
        for row in rows
    ]
    return {"level": level, "figures": figures}


def _table(checked: list[Checked]) -> str:
    lines = ["| load | figure | measured, s | predicted, s | error |", "|---|---|---|---|---|"]
    for level, rows in checked:
        lines += [
            f"| {level} | {row.figure} | {row.measured_s:.3f} | {row.predicted_s:.3f} | {row.error:+.1%} |"
            for row in rows
        ]
    return "\n".join(lines)
