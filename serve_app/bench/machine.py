"""The machine that a measurement was made on: what it is, and how busy others kept it meanwhile.

Owns: facts of hardware, versions, power and heat, and the CPU accounts of server, client and everybody else. Must not
know: loads. What cannot be read is None.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

PACKAGES = ("metalslots", "mlx", "mlx-lm", "ray", "transformers", "numpy", "aiohttp")
COMMAND_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that a reader needs to repeat or doubt a figure."""

    system: str
    architecture: str
    processor: str
    num_cores: int | None
    num_threads: int | None
    memory_bytes: int
    python: str
    versions: dict[str, str]
    git_revision: str | None
    load_average: float | None
    on_battery: bool | None
    thermal_state: str | None


def describe_machine() -> Machine:
    """Read the facts of this machine now."""
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return Machine(
        system=platform.platform(),
        architecture=platform.machine(),
        processor=_processor(),
        num_cores=psutil.cpu_count(logical=False),
        num_threads=psutil.cpu_count(),
        memory_bytes=psutil.virtual_memory().total,
        python=platform.python_version(),
        versions={name: version for name in PACKAGES if (version := _version(name))},
        git_revision=_git_revision(),
        load_average=round(psutil.getloadavg()[0], 2),
        on_battery=None if battery is None else not battery.power_plugged,
        thermal_state=_thermal_state(),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    if sys.platform == "darwin":
        return _output_of("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _git_revision() -> str | None:
    folder = Path(__file__).parent
    revision = _output_of("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    changed = _output_of("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return f"{revision}+changes" if revision and changed else revision


def _thermal_state() -> str | None:
    if sys.platform != "darwin":
        return None
    return _output_of("pmset", "-g", "therm")


def _output_of(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Processor time of one load in core-seconds. ``others_s`` None: the server's processes are not known."""

    client_s: float
    server_s: float | None
    others_s: float | None


class CpuMeter:
    """Splits the machine's busy time between this process, the server's processes and everybody else."""

    def __init__(self, server_pid: int | None) -> None:
        self._server_pid = server_pid
        self._busy_s = _busy_s()
        self._client_s = _own_s()
        self._server_s = dict(_tree_s(server_pid))

    def used(self) -> CpuUse:
        """Time used since the meter was made."""
        client_s = _own_s() - self._client_s
        if self._server_pid is None:
            return CpuUse(client_s, None, None)
        # Per process, so that a worker that ended in between does not make the sum run backwards.
        server_s = sum(used_s - self._server_s.get(pid, 0.0) for pid, used_s in _tree_s(self._server_pid))
        others_s = max(0.0, _busy_s() - self._busy_s - client_s - server_s)
        return CpuUse(client_s, server_s, others_s)


async def busy_cores(sample_s: float) -> float:
    """How many cores are busy while this process sleeps for ``sample_s``."""
    before_s = _busy_s()
    started_s = time.monotonic()
    await asyncio.sleep(sample_s)
    return (_busy_s() - before_s) / max(time.monotonic() - started_s, 1e-3)


def _own_s() -> float:
    times = os.times()
    return times.user + times.system


def _busy_s() -> float:
    times = psutil.cpu_times()._asdict()
    # Linux counts guest time in user time already.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return float(sum(value for name, value in times.items() if name not in idle))


def _tree_s(pid: int | None) -> Iterable[tuple[int, float]]:
    if pid is None:
        return
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        return
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        yield process.pid, times.user + times.system
