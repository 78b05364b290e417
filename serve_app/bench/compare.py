"""Two runs of the same load, pair by pair.

Owns: which runs may be compared, and the ratios. Must not know: how runs are made or shown.

A request of run A and the same request of run B differ by endpoint and luck alone, so the median of their ratios says
more than the ratio of two medians over prompts of unequal length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from serve_app.bench.document import LevelRun, RunDocument
from serve_app.bench.errors import BenchError
from serve_app.bench.results import CallResult
from serve_app.latency import RequestTiming, Summary, summarize


@dataclass(frozen=True, slots=True)
class LevelComparison:
    """B against A at one level: every ratio is B / A, so throughput above 1 and times below 1 favour B.

    Times pair request with request, throughput run with run. ``num_pairs``: requests that both answered.
    """

    level: str
    num_pairs: int
    num_unpaired: int
    output_tokens_per_s: Summary | None
    ttft: Summary | None
    tpot: Summary | None
    e2e: Summary | None
    itl_p95: Summary | None
    goodput: Summary | None


def compare(a: RunDocument, b: RunDocument) -> tuple[LevelComparison, ...]:
    """Compare level by level. Raises BenchError when the two were not asked the same."""
    for name in ("workload", "seed", "sessions_per_client", "num_sessions"):
        left, right = getattr(a.plan, name), getattr(b.plan, name)
        if left != right:
            raise BenchError(f"The runs differ in {name.replace('_', ' ')}.", "run both with the same options")
    levels = [level for level in a.plan.levels if level in b.plan.levels]
    if not levels:
        raise BenchError("The runs have no level in common.", "run both with the same --concurrency or --rate")
    return tuple(_compare_level(str(level), list(_pairs(a, b, str(level)))) for level in levels)


def _pairs(a: RunDocument, b: RunDocument, level: str) -> Iterator[tuple[LevelRun, LevelRun]]:
    others = {(str(run.level), run.repeat): run for run in b.runs}
    for run in a.runs:
        other = others.get((str(run.level), run.repeat))
        if str(run.level) == level and other is not None:
            yield run, other


def _compare_level(level: str, runs: Sequence[tuple[LevelRun, LevelRun]]) -> LevelComparison:
    pairs = [pair for a, b in runs for pair in _answered_by_both(a, b)]
    num_requests = sum(a.result.summary.num_requests for a, _ in runs)
    summaries = [(a.result.summary, b.result.summary) for a, b in runs]
    return LevelComparison(
        level=level,
        num_pairs=len(pairs),
        num_unpaired=num_requests - len(pairs),
        output_tokens_per_s=_ratios((a.output_tokens_per_s, b.output_tokens_per_s) for a, b in summaries),
        ttft=_ratios((a.ttft_s, b.ttft_s) for a, b in pairs),
        tpot=_ratios((a.tpot_s, b.tpot_s) for a, b in pairs),
        e2e=_ratios((a.e2e_s, b.e2e_s) for a, b in pairs),
        itl_p95=_ratios((_p95(a.itl_s), _p95(b.itl_s)) for a, b in summaries),
        goodput=_ratios((a.goodput_per_s, b.goodput_per_s) for a, b in summaries),
    )


def _p95(summary: Summary | None) -> float | None:
    return None if summary is None else summary.p95


def _answered_by_both(a: LevelRun, b: LevelRun) -> Iterator[tuple[RequestTiming, RequestTiming]]:
    def key(call: CallResult) -> tuple[int, int]:
        return call.session_index, call.call_index

    others = {key(call): call.timing for call in b.result.calls}
    for call in a.result.calls:
        other = others.get(key(call))
        if call.timing is not None and other is not None:
            yield call.timing, other


def _ratios(pairs: Iterator[tuple[float | None, float | None]]) -> Summary | None:
    return summarize(b / a for a, b in pairs if a and b is not None)


def comparison_table(a: RunDocument, b: RunDocument) -> str:
    """Markdown: one row per level, each figure as median ratio with its range."""
    header = ("load", "pairs", "throughput", "TTFT", "TPOT", "E2E", "ITL p95")
    rows: list[tuple[str, ...]] = [header]
    for each in compare(a, b):
        figures = (each.output_tokens_per_s, each.ttft, each.tpot, each.e2e, each.itl_p95)
        rows.append((each.level, str(each.num_pairs), *map(_shown, figures)))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    title = f"{b.target.label} / {a.target.label}: throughput above 1 and times below 1 are in favour of the first."
    return "\n".join([title, "", lines[0], "|" + "---|" * len(header), *lines[1:]])


def _shown(ratio: Summary | None) -> str:
    if ratio is None:
        return "-"
    if ratio.num == 1:
        return f"{ratio.p50:.2f}"
    return f"{ratio.p50:.2f} ({ratio.min:.2f}..{ratio.max:.2f})"
