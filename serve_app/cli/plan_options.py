"""Turns the planner's options into a demand, a machine and a service level. Must not know how they are used."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from engine.errors import ConfigError
from engine.memory.ledger import UNMEASURED_SLOTS
from engine.memory.slots import cap_at_knee
from serve_app.bench.workload_files import load_workload
from serve_app.capacity.demand import Demand, FleetLevel
from serve_app.capacity.dispatch import CentralLine, Dispatch, Pinned
from serve_app.capacity.hardware import ModelSpec, auto_slots, estimated_kind
from serve_app.capacity.lengths import LogNormal, Mixture
from serve_app.capacity.perf_model import RateTimes, decode_rows_s
from serve_app.capacity.planner import MachineKind, PlanSettings
from serve_app.capacity.profile import read_profile
from serve_app.capacity.workload import SessionClass, Workload
from serve_app.cli.plan_processes import side_by_side
from serve_app.cli.plan_router import RouterDispatch

# The office of the question that started this: wait under 3 s in the mean, under 10 s for 95%.
DEFAULT_SLO = "wait_mean:3,wait_p95:10"
_SLO_FIELDS = {
    "wait_mean": "wait_mean_s",
    "wait_p95": "wait_p95_s",
    "ttft_p95": "ttft_p95_s",
    "e2e_p95": "e2e_p95_s",
    "tokens_per_s": "tokens_per_s_p5",
}
_ESTIMATE_DEFAULTS = {"memory": 128.0, "params": 32.0, "active": 0.0, "bits": 4.5, "kv_kb": 128.0}
_DISPATCHES: Mapping[str, Callable[[], Dispatch]] = {
    "central": CentralLine,
    "router": RouterDispatch,
    "pinned": Pinned,
}
_ROWS_COMPARED = (1, 2, 4, 8, 16, 32)

Estimate = Annotated[
    str | None, typer.Option(help="From specifications: m3-ultra,memory=256,params=32,active=3,bits=4.5,kv_kb=128.")
]
DecodeShare = Annotated[
    float | None, typer.Option(min=0.01, max=0.95, help="Decoding's share of the time while a prompt is read.")
]
Slo = Annotated[str, typer.Option(help="wait_mean, wait_p95, ttft_p95, e2e_p95 in seconds; tokens_per_s.")]


@dataclass(frozen=True, slots=True)
class DemandOptions:
    """Who asks what, as written on the command line."""

    people: int
    calls_per_person: float
    calls_per_hour: float | None
    peak_factor: float
    prompts: str
    output_mean: float
    output_cv: float
    workload: str | None


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """What a machine can do, as written: a profile, an estimate, or rates by hand."""

    profile: Path | None
    estimate: str | None
    prefill_rate: float
    decode_rate: float
    batch_gain: str
    decode_share: float | None


def demand_of(options: DemandOptions) -> Demand:
    """The demand. Raises ConfigError, or BenchError for an unknown workload."""
    workload = load_workload(options.workload) if options.workload else _paper_workload(options)
    calls_per_hour = options.calls_per_hour
    if calls_per_hour is None:
        calls_per_hour = options.people * options.calls_per_person
    if calls_per_hour <= 0:
        raise ConfigError(f"The load is {calls_per_hour:g} calls an hour.", "give --calls-per-hour or --people")
    return Demand(workload, calls_per_hour, options.peak_factor)


def _paper_workload(options: DemandOptions) -> Workload:
    prompts = {float(tokens): share for tokens, share in _pairs(options.prompts, "--prompts").items()}
    output = LogNormal(kind="lognormal", mean=options.output_mean, cv=options.output_cv)
    call = SessionClass(name="call", prompt_tokens=Mixture(kind="mixture", values=prompts), output_tokens=output)
    return Workload(name="given by hand", sessions=(call,))


def machine_of(options: MachineOptions) -> MachineKind:
    """The machine, from the best source given. Raises ConfigError."""
    if options.profile is not None:
        profile = read_profile(options.profile)
        return MachineKind(
            name=f"{profile.machine} with {profile.model} (measured {profile.measured_at})",
            times=profile.times,
            decode_share=options.decode_share,
            target_stall_s=profile.target_stall_s,
            max_chunk_tokens=profile.max_chunk_tokens,
        )
    if options.estimate is not None:
        chip, memory_gib, model = _estimate(options.estimate)
        return estimated_kind(chip, memory_gib, model)
    gains = tuple(_number(part, "--batch-gain") for part in options.batch_gain.split(","))
    times = RateTimes(options.prefill_rate, options.decode_rate, gains)
    return MachineKind("rates given by hand", times, decode_share=options.decode_share)


def _estimate(text: str) -> tuple[str, float, ModelSpec]:
    chip, _, rest = text.partition(",")
    values = {**_ESTIMATE_DEFAULTS, **_pairs(rest, "--estimate", tuple(_ESTIMATE_DEFAULTS))}
    active = values["active"] or values["params"]
    model = ModelSpec(values["params"] * 1e9, active * 1e9, values["bits"], values["kv_kb"] * 1024)
    return chip, values["memory"], model


def level_of(slo: str) -> FleetLevel:
    """The service level from "wait_mean:3,e2e_p95:30". Raises ConfigError."""
    return FleetLevel(**{_SLO_FIELDS[name]: value for name, value in _pairs(slo, "--slo", tuple(_SLO_FIELDS)).items()})


def settings_of(slo: str, routing: str, calls_per_run: int | None, seed: str) -> PlanSettings:
    """How to judge, route and simulate; runs go side by side on all cores. Raises ConfigError."""
    dispatch = dispatch_of(routing)
    return PlanSettings(level_of(slo), calls_per_run=calls_per_run, seed=seed, dispatch=dispatch, run_all=side_by_side)


def dispatch_of(routing: str) -> Callable[[], Dispatch]:
    """How calls find machines. Raises ConfigError."""
    if routing not in _DISPATCHES:
        raise ConfigError(f"`--routing` is {routing!r}.", f"write {' or '.join(_DISPATCHES)}")
    return _DISPATCHES[routing]


def slot_counts(text: str, machine: MachineKind, estimate: str | None) -> tuple[int, ...]:
    """Slots to try. ``auto`` is what the engine would choose: memory's balance, capped where the gain flattens."""
    counts = []
    for part in text.split(","):
        if part == "auto":
            counts.append(_auto(machine, estimate))
        else:
            counts.append(int(_number(part, "--slots")))
    return tuple(dict.fromkeys(counts))


def _auto(machine: MachineKind, estimate: str | None) -> int:
    alone_s = decode_rows_s(machine.times, 1)
    gains = {k: k * alone_s / decode_rows_s(machine.times, k) for k in _ROWS_COMPARED}
    if estimate is not None:
        _, memory_gib, model = _estimate(estimate)
        return auto_slots(memory_gib, model, gains)
    cap = cap_at_knee(UNMEASURED_SLOTS, gains)
    return cap.slots if cap else UNMEASURED_SLOTS


def _pairs(text: str, option: str, known: tuple[str, ...] = ()) -> dict[str, float]:
    values = {}
    for part in filter(None, text.split(",")):
        name, separator, value = part.replace("=", ":").partition(":")
        if known and name not in known:
            closest = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(f"`{option}` names {name!r}.", f"write {closest[0] if closest else ', '.join(known)}")
        if not separator:
            raise ConfigError(f"`{option}` holds {part!r}.", "write name:value, name:value")
        _number(name, option) if not known else None
        values[name] = _number(value, option)
    return values


def _number(text: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value < 0:
        raise ConfigError(f"`{option}` holds {text!r}.", "write a number that is not negative")
    return value


assert set(_SLO_FIELDS.values()) == {field.name for field in fields(FleetLevel)}
