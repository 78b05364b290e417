"""How long the GPU spends on each kernel: recorded by PyTorch's profiler, which sees every kernel of the process.

Once it has recorded, launches of the process stay slower: measure wall times first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One run of one kernel."""

    name: str
    start_ns: int
    end_ns: int


def record(work: Callable[[], object]) -> list[KernelRun]:
    """Every kernel that runs during ``work``, by start. Raises ImportError without PyTorch."""
    from torch.autograd import DeviceType  # type: ignore[import-not-found]
    from torch.profiler import ProfilerActivity, profile  # type: ignore[import-not-found]

    mx.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        mx.synchronize()
    events: list[Any] = profiler.profiler.kineto_results.events()
    runs = [
        KernelRun(_short(event.name()), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA
    ]
    return sorted(runs, key=lambda run: run.start_ns)


def busy_ms(runs: Sequence[KernelRun]) -> tuple[float, list[float]]:
    """How long at least one kernel ran, and the gaps between, in ms."""
    total, gaps, end_ns = 0.0, [], runs[0].start_ns
    for run in runs:
        if run.start_ns > end_ns:
            gaps.append((run.start_ns - end_ns) / 1e6)
        total += max(0, run.end_ns - max(run.start_ns, end_ns)) / 1e6
        end_ns = max(end_ns, run.end_ns)
    return total, gaps


def by_name(runs: Sequence[KernelRun], num_steps: int, most: int = 16) -> Iterator[str]:
    """Kernels of one name together, the longest first, per step."""
    count: Counter[str] = Counter()
    total_ns: Counter[str] = Counter()
    for run in runs:
        count[run.name] += 1
        total_ns[run.name] += run.end_ns - run.start_ns
    for name, nanoseconds in total_ns.most_common(most):
        times, each_us = count[name] / num_steps, nanoseconds / count[name] / 1e3
        yield f"{nanoseconds / num_steps / 1e6:6.3f} ms  {times:5.1f} x {each_us:7.1f} us  {name}"


def _short(name: str) -> str:
    return re.sub(r"void |mlx::core::cu::|custom_kernel_", "", name)[:80]
