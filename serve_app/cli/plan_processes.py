"""Simulates several runs in processes of their own, which end with whoever asked. Must not know what is simulated."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait

from serve_app.capacity.planner import Run, one_by_one, run_simulation
from serve_app.capacity.simulator import Simulation


def side_by_side(runs: Sequence[Run]) -> Sequence[Simulation]:
    """Simulate on all cores, results in order; one run stays in this process."""
    num_workers = min(len(runs), os.cpu_count() or 1)
    if num_workers < 2:
        return one_by_one(runs)
    # spawn and not fork: a fork of a process with threads (a progress bar has one) may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_end_with_parent) as pool:
        return list(pool.map(run_simulation, runs))


def _end_with_parent() -> None:
    """A worker in the middle of a run notices only afterwards that nobody wants it: minutes of a core, for nothing."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is no worker"
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
