"""Draws runs: throughput and latency against load, distributions, and slots over time.

Owns: pictures, as PNG and SVG. Must not know: how figures come about. matplotlib draws without a screen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.bench.document import LevelRun, RunDocument
from serve_app.bench.plan import Level
from serve_app.latency import LoadSummary, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
# Distinct in hue and in lightness, so that they stay apart in grey and for most colour-blind readers.
COLOURS = ("#0b5394", "#d9730d", "#3d9970", "#8e44ad", "#7f8c8d")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.hashsalt": "metalslots",
}


def draw_all(documents: Sequence[RunDocument], folder: Path, stem: str) -> tuple[Path, ...]:
    """Draw every picture that the documents have figures for, and return the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pictures: list[tuple[str, Callable[[Sequence[RunDocument]], Figure | None]]] = [
        ("levels", draw_levels),
        ("distributions", draw_distributions),
        ("slots", draw_slots),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with pyplot.rc_context(STYLE):
        for name, draw in pictures:
            figure = draw(documents)
            if figure is None:
                continue
            for suffix in FORMATS:
                paths.append(folder / f"{stem}-{name}.{suffix}")
                figure.savefig(paths[-1], dpi=150, bbox_inches="tight")
            pyplot.close(figure)
    return tuple(paths)


def draw_levels(documents: Sequence[RunDocument]) -> Figure | None:
    """Throughput, first token and token gaps against the load. Bars reach from p50 to p95."""
    from matplotlib import pyplot

    figure, (rate, first, gap) = pyplot.subplots(1, 3, figsize=(11, 3.4))
    for document, colour in zip(documents, COLOURS, strict=False):
        levels = sorted({run.level for run in document.runs}, key=_load)
        runs = [[run for run in document.runs if run.level == level] for level in levels]
        loads = [_load(level) for level in levels]
        tokens = [_median(each, lambda run: run.result.summary.output_tokens_per_s) for each in runs]
        rate.plot(loads, tokens, "o-", color=colour, label=document.target.label, markersize=4)
        _spans(first, loads, runs, lambda summary: summary.ttft_s, 1.0, colour)
        _spans(gap, loads, runs, lambda summary: summary.itl_s, 1000.0, colour)
    loads = sorted({_load(run.level) for document in documents for run in document.runs})
    unit = "clients" if documents[0].plan.levels[0].num_clients else "sessions per second"
    _label(rate, unit, "output tokens per second", "Throughput")
    _label(first, unit, "seconds", "Time to first token, p50 to p95")
    _label(gap, unit, "milliseconds", "Gap between tokens, p50 to p95")
    for axes in (rate, first, gap):
        axes.set_ylim(bottom=0)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
    _legend(figure, rate)
    return figure


def draw_distributions(documents: Sequence[RunDocument]) -> Figure | None:
    """Cumulative shares of time to first token and end-to-end time at the fullest level."""
    from matplotlib import pyplot

    figure, (first, whole) = pyplot.subplots(1, 2, figsize=(8, 3.2))
    drawn = False
    for document, colour in zip(documents, COLOURS, strict=False):
        runs = _by_load(document.runs)
        if not runs:
            continue
        timings = [c.timing for run in runs if run.level == runs[-1].level for c in run.result.calls if c.timing]
        _cumulative(first, (timing.ttft_s for timing in timings), colour, document.target.label)
        _cumulative(whole, (timing.e2e_s for timing in timings), colour, document.target.label)
        drawn = drawn or bool(timings)
    title = str(_by_load(documents[0].runs)[-1].level) if documents[0].runs else ""
    _label(first, "seconds", "share of requests", f"Time to first token, {title}")
    _label(whole, "seconds", "share of requests", f"End to end, {title}")
    _legend(figure, first)
    return figure if drawn else None


def draw_slots(documents: Sequence[RunDocument]) -> Figure | None:
    """Running and waiting requests over the fullest load, as the endpoint reported them."""
    from matplotlib import pyplot

    reporting = [document for document in documents if any(run.slots for run in document.runs)]
    if not reporting:
        return None
    figure, all_axes = pyplot.subplots(1, len(reporting), figsize=(5 * len(reporting), 3), squeeze=False)
    for document, axes in zip(reporting, all_axes[0], strict=True):
        run = max((run for run in document.runs if run.slots), key=lambda run: _load(run.level))
        times_s = [sample.at_s for sample in run.slots]
        running = [sample.num_running for sample in run.slots]
        waiting = [sample.num_waiting for sample in run.slots]
        axes.stackplot(times_s, running, waiting, labels=("running", "waiting"), colors=COLOURS[:2], step="post")
        axes.axhline(run.slots[0].num_slots, color="black", linewidth=0.8, linestyle="--", label="slots")
        _label(axes, "seconds since the load began", "requests", f"{document.target.label}, {run.level}")
    _legend(figure, all_axes[0][0])
    return figure


def _spans(
    axes: Axes,
    loads: Sequence[float],
    runs: Sequence[Sequence[LevelRun]],
    of: Callable[[LoadSummary], Summary | None],
    factor: float,
    colour: str,
) -> None:
    """Median over repeats of p50, with a bar up to the median of p95."""

    def quantile(each: Sequence[LevelRun], name: str) -> float:
        return _median(each, lambda run: getattr(of(run.result.summary), name, math.nan) * factor)

    middle = [quantile(each, "p50") for each in runs]
    reach = [quantile(each, "p95") - low for each, low in zip(runs, middle, strict=True)]
    axes.errorbar(loads, middle, yerr=([0.0] * len(reach), reach), fmt="o-", color=colour, markersize=4, capsize=3)


def _median(runs: Sequence[LevelRun], figure: Callable[[LevelRun], float]) -> float:
    return statistics.median(map(figure, runs))


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.tight_layout()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), bbox_to_anchor=(0.5, -0.08))


def _cumulative(axes: Axes, values: Iterable[float], colour: str, label: str) -> None:
    ordered = sorted(values)
    shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
    axes.step(ordered, shares, where="post", color=colour, label=label)


def _label(axes: Axes, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=9)


def _load(level: Level) -> float:
    return float(level.num_clients or level.rate_per_s or 0)


def _by_load(runs: Iterable[LevelRun]) -> list[LevelRun]:
    return sorted(runs, key=lambda run: _load(run.level))
