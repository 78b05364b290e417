"""Keeps every core busy with work that gives way to any other, so that a process is as fast alone as beside a busy one.

Two replicas on one small machine share its caches, its memory and perhaps the arithmetic of one core; on two Macs they
would not. With this running a replica's speed does not depend on what its neighbour does. Linux only (SCHED_IDLE).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_MATRIX_NUMBERS = 128 * 2**20 // 4
_WIDTH = 1536


@contextmanager
def busy_cores() -> Iterator[None]:
    """Inside, one such process runs on each core."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen([sys.executable, "-m", "tests.perf.busy_cores", str(core)], env=environment)
        for core in sorted(os.sched_getaffinity(0))
    ]
    try:
        yield
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _work(core: int) -> None:
    """What a replica's steps do to the machine: weights read from memory, for few rows and for many. Ends with its
    parent."""
    import numpy as np

    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    parent = os.getppid()
    weights = np.ones((_MATRIX_NUMBERS // _WIDTH, _WIDTH), np.float32)
    few, many = np.ones((_WIDTH, 4), np.float32), np.ones((_WIDTH, 64), np.float32)
    while os.getppid() == parent:
        for rows in (few, many):
            weights @ rows


if __name__ == "__main__":
    _work(int(sys.argv[1]))
