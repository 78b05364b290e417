"""The options that the bench commands share, and how their texts become values. Must not know their use."""

from __future__ import annotations

from typing import Annotated

import typer

from engine.errors import ConfigError
from serve_app.bench.plan import Level
from serve_app.bench.workload_files import load_workload
from serve_app.capacity.workload import Workload
from serve_app.latency import ServiceLevel

WorkloadName = Annotated[
    str | None, typer.Option("--workload", help="A workload file, or the name of one in configs/workloads.")
]
Scale = Annotated[float, typer.Option(min=0.0001, max=100, help="Multiply every token count of the workload.")]
Concurrency = Annotated[str, typer.Option(help="Closed loop: numbers of clients, one level each.")]
PerClient = Annotated[int, typer.Option(min=1, help="Closed loop: sessions for each client of a level.")]
Seed = Annotated[str, typer.Option(help="The same seed sends the same prompts in the same order.")]
Repeats = Annotated[int, typer.Option(min=1, max=50, help="Run every level this often.")]
SloText = Annotated[str, typer.Option("--slo", help="Bounds for goodput in ms: ttft:2000,tpot:100,e2e:30000.")]
MaxLevel = Annotated[float, typer.Option("--max-level-s", min=1, help="Cut a level off after so many seconds.")]
MaxTotal = Annotated[float, typer.Option("--max-total-s", min=1, help="Start no further level after so long.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(help='Model that counts tokens ("demo", folder, .gguf, hub id), for exact prompt lengths.'),
]
OutFolder = Annotated[str, typer.Option("--out", help="Folder for the JSON, Markdown and pictures.")]
Plots = Annotated[bool, typer.Option("--plots", help="Also draw PNG and SVG pictures.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 when the figures may not be quoted.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be sent, and send nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
AllowRemote = Annotated[bool, typer.Option("--allow-remote", help="Test an endpoint on another machine.")]
ApiKey = Annotated[str | None, typer.Option("--key", envvar="METALSLOTS_API_KEY", help="API key, if it asks for one.")]
Url = Annotated[str, typer.Option("--url", "--base-url", help="Address of the endpoint, without /v1.")]

_SLO_NAMES = {"queue": "queue_s", "ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}


def chosen_workload(name: str | None, scale: float) -> Workload:
    """Load and scale a workload."""
    workload = load_workload(name)
    return workload if scale == 1 else workload.scaled(scale)


def parse_levels(concurrency: str, rates: str) -> tuple[Level, ...]:
    """Levels from "1,4,8" clients or, when given, from rates per second. Raises ConfigError naming the wrong part."""
    if rates:
        return tuple(Level(rate_per_s=_positive(part, "--rate", float)) for part in rates.split(","))
    return tuple(Level(num_clients=int(_positive(part, "--concurrency", int))) for part in concurrency.split(","))


def parse_slo(text: str) -> ServiceLevel:
    """Bounds from "ttft:2000,tpot:100", in milliseconds. Raises ConfigError naming the wrong part."""
    bounds: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition(":")
        if name not in _SLO_NAMES:
            raise ConfigError(f"`--slo` names {name!r}.", f"use {', '.join(_SLO_NAMES)}, each with milliseconds")
        bounds[_SLO_NAMES[name]] = _positive(value, "--slo", float) / 1000
    return ServiceLevel(**bounds)


def _positive(text: str, option: str, kind: type[int] | type[float]) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if value <= 0:
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"`{option}` holds {text!r}.", f"write {what} above zero")
    return value


def whole_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers from "1,2,4". Raises ConfigError naming the wrong part."""
    return tuple(int(_positive(part, "the list", int)) for part in text.split(","))
