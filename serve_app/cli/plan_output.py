"""Shows what the planner found: JSON, a table, and the assumptions in words. Must not know how it was found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from serve_app.capacity.planner import MIN_ERROR_S, USUAL_CALLS, Option, Planner
from serve_app.latency import Summary

# Slots, and for each change its name and how the fleet then fares.
Changes = Sequence[tuple[int, Sequence[tuple[str, Option]]]]


def option_values(option: Option, spare: int) -> dict[str, Any]:
    """One option as plain values. An unstable one has no times: a line that grows has no mean."""
    answers = option.answers
    return {
        "macs": option.macs,
        "macs_with_spare": option.macs + spare,
        "slots": option.slots,
        "stable": option.stable,
        "utilisation": round(option.utilisation, 4),
        "wait_s": _quantiles(answers.wait_s if answers else None),
        "ttft_s": _quantiles(answers.ttft_s if answers else None),
        "e2e_s": _quantiles(answers.e2e_s if answers else None),
        "time_per_token_s": _quantiles(answers.tpot_s if answers else None),
        "meets_slo": option.meets_slo,
        "missed": list(option.missed) if option.stable else ["unstable: more work comes than can be done"],
        "binds": option.binds,
        "mmc_bound": {
            "wait_probability": _finite(option.bound.probability),
            "wait_mean_s": _finite(option.bound.mean_s),
            "wait_p95_s": _finite(option.bound.p95_s),
        },
    }


def _quantiles(summary: Summary | None) -> dict[str, float] | None:
    if summary is None:
        return None
    return {key: round(value, 4) for key, value in asdict(summary).items() if key in ("mean", "p50", "p95", "p99")}


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def option_table(options: Iterable[Option], spare: int) -> str:
    """Markdown, one row per option."""
    header = (
        "slots",
        "Macs",
        "busy",
        "wait mean / p95, s",
        "TTFT p95, s",
        "end to end p50 / p95, s",
        "binds",
        "verdict",
    )
    rows: list[tuple[str, ...]] = [header, *(_row(option, spare) for option in options)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def _row(option: Option, spare: int) -> tuple[str, ...]:
    macs = f"{option.macs} + {spare} spare" if spare else str(option.macs)
    busy = f"{option.utilisation:.0%}"
    answers = option.answers
    if answers is None or answers.wait_s is None or answers.ttft_s is None or answers.e2e_s is None:
        return (str(option.slots), macs, busy, "grows", "grows", "grows", option.binds, "unstable")
    wait, e2e = answers.wait_s, answers.e2e_s
    return (
        str(option.slots),
        macs,
        busy,
        f"{wait.mean:.2f} / {wait.p95:.1f}",
        f"{answers.ttft_s.p95:.1f}",
        f"{e2e.p50:.1f} / {e2e.p95:.1f}",
        option.binds,
        "meets the bounds" if option.meets_slo else "; ".join(option.missed),
    )


def assumptions(planner: Planner, routing: str, spare: int) -> list[str]:
    """What the answer rests on, in sentences."""
    demand, cost, level = planner.demand, planner.cost, planner.level
    bounds = [f"{name} {value:.3g}" for name, value in asdict(level).items() if value is not None]
    return [
        f"Machine: {planner.kind.name}.",
        f"Load: {demand.calls_per_hour:g} calls in the busiest hour, {demand.peak_factor:g} times that at its peak, "
        "arriving independently of one another.",
        f"A call alone takes {cost.alone_s:.1f} s in the mean ({cost.prefill_s:.1f} s for the prompt, "
        f"{cost.decode_s:.1f} s for the answer); squared coefficient of variation {cost.squared_cv:.2f}.",
        f"Bounds: {', '.join(bounds)} (wait is from arrival until the prompt is begun). "
        "A bound on end-to-end time always applies, because slots can hide waiting inside slow answers.",
        _ROUTING_WORDS[routing],
        f"Every option is simulated through the engine's own scheduler, {_num_calls_words(planner)} "
        f"(seed {planner.settings.seed}, the first 5% of each left out) until the mean wait is known to "
        f"{planner.settings.precision:.1%} or {MIN_ERROR_S:g} s, one standard error.",
        "Answers are reserved whole in KV memory, so nothing is preempted; no token is guessed ahead.",
        f"{spare} spare machine{'s' if spare != 1 else ''} on top of the working ones.",
    ]


def _num_calls_words(planner: Planner) -> str:
    asked = planner.settings.calls_per_run
    if asked is None:
        return f"at least {USUAL_CALLS:,} calls a run and as many as the fleet needs to fill"
    return f"at least {asked:,} calls a run"


_ROUTING_WORDS = {
    "central": "Calls wait in one line for the whole fleet, the best that any router can do without knowing lengths.",
    "router": "Calls go where the fleet's own routing policy sends them, from a report of each machine once a second.",
    "pinned": "Every session stays on one machine, however busy it is.",
}


def plan_values(found: Sequence[Option], changes: Changes, notes: Sequence[str], spare: int) -> dict[str, Any]:
    """The whole answer as plain values."""
    return {
        "options": [option_values(option, spare) for option in found],
        "what_if": [
            {"slots": slots, "change": name, **option_values(option, spare)}
            for slots, each in changes
            for name, option in each
        ],
        "assumptions": list(notes),
    }


def plan_text(found: Sequence[Option], changes: Changes, notes: Sequence[str], spare: int) -> str:
    """The whole answer for a terminal."""
    parts = [option_table(found, spare)]
    parts += ["\n- ".join((f"What if, with {slots} slots:", *what_if_lines(each))) for slots, each in changes]
    return "\n\n".join((*parts, "\n- ".join(("Assumptions:", *notes))))


def what_if_lines(changes: Sequence[tuple[str, Option]]) -> list[str]:
    """One sentence for each change."""
    lines = []
    for name, option in changes:
        if not option.stable:
            lines.append(f"{name}: unstable ({option.utilisation:.0%} of capacity asked)")
        else:
            verdict = "still meets the bounds" if option.meets_slo else "; ".join(option.missed)
            lines.append(f"{name}: {verdict} ({option.macs} Macs, {option.utilisation:.0%} busy)")
    return lines
