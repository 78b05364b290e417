"""Shows runs to people: a Markdown table, a verdict in words, and the plan of a run that has not happened yet.

Owns: which figures are shown and in which unit. Must not know: how they were measured.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from serve_app.bench.document import LevelRun, RunDocument
from serve_app.bench.plan import BenchPlan, Level, forecast
from serve_app.bench.self_check import SelfCheck
from serve_app.latency import LoadSummary, Summary

Figure = Callable[[LevelRun], float | None]
HEADER = (
    "server",
    "load",
    "output tok/s",
    "TTFT p50 / p95, s",
    "ITL p50 / p95, ms",
    "TPOT p50, ms",
    "E2E p50 / p95, s",
    "failed",
)


def markdown_table(documents: Sequence[RunDocument]) -> str:
    """One row per level and endpoint, levels together. Several runs of a level show as median (smallest..largest)."""
    rows = [HEADER, *_rows(documents)]
    has_goodput = any(run.result.summary.goodput_per_s is not None for doc in documents for run in doc.runs)
    if has_goodput:
        rows = [(*HEADER, "goodput, req/s"), *_rows(documents, with_goodput=True)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _rows(documents: Sequence[RunDocument], *, with_goodput: bool = False) -> Iterator[tuple[str, ...]]:
    levels = dict.fromkeys(level for document in documents for level in document.plan.levels)
    for level in levels:
        for document in documents:
            runs = [run for run in document.runs if run.level == level]
            if runs:
                row = _row(document.target.label, level, runs)
                yield (*row, _spread(runs, lambda run: run.result.summary.goodput_per_s, 2)) if with_goodput else row


def _row(label: str, level: Level, runs: Sequence[LevelRun]) -> tuple[str, ...]:
    num_failed = sum(run.result.summary.num_failed for run in runs)
    num_requests = sum(run.result.summary.num_requests for run in runs)
    return (
        label,
        str(level),
        _spread(runs, lambda run: run.result.summary.output_tokens_per_s, 1),
        _pair(runs, lambda summary: summary.ttft_s, 1, 2),
        _pair(runs, lambda summary: summary.itl_s, 1000, 0),
        _spread(runs, _quantile(lambda summary: summary.tpot_s, "p50", 1000), 0),
        _pair(runs, lambda summary: summary.e2e_s, 1, 1),
        f"{num_failed} of {num_requests}" if num_failed else "0",
    )


def _quantile(of: Callable[[LoadSummary], Summary | None], name: str, factor: float) -> Figure:
    def read(run: LevelRun) -> float | None:
        summary = of(run.result.summary)
        return None if summary is None else float(getattr(summary, name)) * factor

    return read


def _pair(runs: Sequence[LevelRun], of: Callable[[LoadSummary], Summary | None], factor: float, digits: int) -> str:
    return " / ".join(_spread(runs, _quantile(of, name, factor), digits) for name in ("p50", "p95"))


def _spread(runs: Sequence[LevelRun], figure: Figure, digits: int) -> str:
    values = [value for run in runs if (value := figure(run)) is not None]
    if not values:
        return "-"
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def markdown_report(documents: Sequence[RunDocument], *, title: str) -> str:
    """The table with what a reader must know to repeat it: load, machine, versions, command, verdicts."""
    first = documents[0]
    machine = first.machine
    memory_gib = machine.memory_bytes / 2**30
    lines = [
        f"# {title}",
        "",
        markdown_table(documents),
        "",
        f"Load: {describe_load(first.plan)}",
        f"Machine: {machine.processor}, {machine.num_threads} threads, {memory_gib:.0f} GiB, {machine.system}.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in machine.versions.items()) + ".",
        f"Started {first.started_at}, revision {machine.git_revision or 'unknown'}.",
        "",
        "Repeat it with:",
        "",
        "    " + shlex.join(first.command),
        "",
        *verdict_lines(documents),
    ]
    return "\n".join(lines) + "\n"


def verdict_lines(documents: Iterable[RunDocument]) -> Iterator[str]:
    """One line for each endpoint's verdict and one for each reason."""
    for document in documents:
        verdict = document.verdict
        checked = document.answers
        same = f", {checked.num_equal} of {checked.num_checked} answers as when sent alone" if checked else ""
        yield f"Verdict, {document.target.label}: {'valid' if verdict.valid else 'invalid'}{same}"
        yield from (f"- {reason}" for reason in verdict.reasons)


def describe_load(plan: BenchPlan) -> str:
    """The load in one sentence."""
    workload = plan.workload
    sizes = f"{plan.sessions_per_client} sessions a client"
    if any(level.rate_per_s for level in plan.levels):
        sizes = f"{plan.num_sessions} sessions a level, Poisson arrivals"
    return (
        f"`{workload.name}` over /v1/{'chat/' if workload.endpoint == 'chat' else ''}completions, {sizes}, "
        f"greedy, exact answer lengths, seed {plan.seed}, {plan.num_repeats} run(s) of each level."
    )


def plan_table(plan: BenchPlan) -> str:
    """What `--dry-run` shows."""
    rows = [
        ("load", "run", "sessions", "requests", "prompt tokens", "output tokens", "longest request, tokens"),
        *(
            (
                each.level,
                str(each.repeat + 1),
                str(each.num_sessions),
                str(each.num_calls),
                str(each.num_prompt_tokens),
                str(each.num_output_tokens),
                str(each.longest_call_tokens),
            )
            for each in forecast(plan)
        ),
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def self_check_text(check: SelfCheck) -> str:
    """What a check of the client found, in words."""
    delay, written, stamped = check.delays_s, check.gaps_written_s, check.gaps_stamped_s
    return "\n".join(
        (
            f"{check.num_events} events in {check.num_streams} streams, {check.events_per_s:.0f} a second, "
            f"{check.client_cores:.2f} cores used by the client",
            f"written to stamped: p50 {delay.p50 * 1000:.2f} ms, p99 {delay.p99 * 1000:.2f} ms, "
            f"largest {delay.max * 1000:.2f} ms",
            f"gaps as written: p50 {written.p50 * 1000:.2f} ms, p95 {written.p95 * 1000:.2f} ms; "
            f"as stamped: p50 {stamped.p50 * 1000:.2f} ms, p95 {stamped.p95 * 1000:.2f} ms",
            "the client keeps time"
            if check.passed
            else "too late: close other programs, or measure with fewer streams",
        )
    )
