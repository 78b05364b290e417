"""Workers of the planner: results in order, and nobody computes on for a planner that was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from serve_app.capacity.dispatch import CentralLine
from serve_app.capacity.planner import Run, one_by_one
from serve_app.capacity.simulator import Load
from serve_app.cli.plan_processes import side_by_side
from tests.long.test_capacity_simulator import office, spec
from tests.serve_endpoint import eventually

ROOT = Path(__file__).parents[2]
FOR_MINUTES = """
from tests.long.test_capacity_processes import runs, side_by_side
if __name__ == "__main__":
    side_by_side(runs(200_000))
"""


def runs(num_sessions: int) -> list[Run]:
    loads = [Load(office(), 0.1, num_sessions, seed=str(seed)) for seed in range(2)]
    return [Run((spec(2),) * 3, load, CentralLine, 8, is_plain=False) for load in loads]


def test_results_are_those_of_one_process() -> None:
    assert side_by_side(runs(40)) == one_by_one(runs(40))


def test_workers_end_with_a_planner_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "plan.py"
    script.write_text(FOR_MINUTES)
    planner = subprocess.Popen([sys.executable, str(script)], cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    try:
        # The resource tracker of the standard library is a child too, and ends by itself.
        eventually(lambda: len(computing(planner.pid)) == 2)
        workers = computing(planner.pid)
    finally:
        planner.kill()
        planner.wait()
    eventually(lambda: not any(worker.is_running() for worker in workers))


def computing(pid: int) -> list[psutil.Process]:
    """Workers that have used a second of a core."""
    children = psutil.Process(pid).children()
    return [child for child in children if child.cpu_times().user > 1 and "spawn_main" in " ".join(child.cmdline())]
