"""Simulates several runs in processes of their own. Must not know what is simulated."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from serve_app.capacity.planner import Run, one_by_one, run_simulation
from serve_app.capacity.simulator import Simulation


def side_by_side(runs: Sequence[Run]) -> Sequence[Simulation]:
    """Simulate on all cores, results in order; one run stays in this process."""
    num_workers = min(len(runs), os.cpu_count() or 1)
    if num_workers < 2:
        return one_by_one(runs)
    # spawn and not fork: a fork of a process with threads (a progress bar has one) may hang.
    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(run_simulation, runs))
