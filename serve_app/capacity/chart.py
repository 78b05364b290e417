"""Draws a plan's options side by side. Must not know how they were found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from serve_app.capacity.planner import Option

_COLOURS = ("#0b5394", "#d9730d")


def draw_options(options: Sequence[Option], path: Path) -> None:
    """Macs needed, and what callers see, by number of slots; the format follows the file's suffix."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [f"{option.slots} slot{'s' if option.slots > 1 else ''}" for option in options]
    figure, (count, times) = pyplot.subplots(1, 2, figsize=(8, 3.2))
    bars = count.bar(names, [option.macs for option in options], color=_COLOURS[0])
    count.bar_label(bars, [f"{option.utilisation:.0%} busy" for option in options], fontsize=8)
    count.set_title("Macs working", fontsize=9)
    answered = [(name, option.answers) for name, option in zip(names, options, strict=True) if option.answers]
    for place, (_, answers) in enumerate(answered):
        for offset, summary, colour in ((-0.2, answers.wait_s, _COLOURS[0]), (0.2, answers.e2e_s, _COLOURS[1])):
            if summary is not None:
                times.bar(place + offset, summary.p95, width=0.4, color=colour, alpha=0.5)
                times.bar(place + offset, summary.p50, width=0.4, color=colour)
    times.set_xticks(range(len(answered)), [name for name, _ in answered])
    times.set_title("Seconds, p50 and p95: wait (blue), end to end (orange)", fontsize=9)
    for axes in (count, times):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
