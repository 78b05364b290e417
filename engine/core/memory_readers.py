"""Reads the machine's memory: Linux from /proc and its control group, macOS from the kernel.

Owns: the operating systems' interfaces. Must not know: what the numbers are used for, or MLX; limits that only the
array library knows (Metal's working set) are added where MLX may be asked. What cannot be read is None, never a guess.
The macOS reader has been tested against a stand-in of these calls only.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil

from engine.memory.guard import MemoryReading, Pressure
from engine.memory.guard_driver import MemoryReader
from engine.memory.plan_inputs import MachineMemory

_KIB = 1024
# kern.memorystatus_vm_pressure_level: dispatch_source_memorypressure_flags_t, dispatch/source.h.
_MAC_PRESSURE = {1: Pressure.NORMAL, 2: Pressure.WARNING, 4: Pressure.CRITICAL}
_RUSAGE_INFO_V0 = 0


class SystemReader(MemoryReader, Protocol):
    """A reader that also knows how much memory there is."""

    @property
    def total_bytes(self) -> int:
        """The memory that this process could at most be given."""
        ...


class LinuxReader:
    """``MemAvailable``, cut to what the control group still allows, and this process's private and shared memory.

    Pages of mapped files do not count as own: the system takes them back without asking. A process whose memory was
    swapped out is still charged with it.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def read(self) -> MemoryReading:
        """One reading; Linux says nothing of pressure by itself."""
        available_bytes = self._fields("proc/meminfo").get("MemAvailable")
        group_left_bytes = self._group_left_bytes()
        if available_bytes is not None and group_left_bytes is not None:
            available_bytes = min(available_bytes, group_left_bytes)
        return MemoryReading(None, available_bytes, self._footprint_bytes())

    @property
    def total_bytes(self) -> int:
        """The machine's memory, or the control group's limit where it is lower."""
        total = self._fields("proc/meminfo").get("MemTotal") or psutil.virtual_memory().total
        return min(total, self._group_number("memory.max") or total)

    def _footprint_bytes(self) -> int | None:
        fields = self._fields("proc/self/status")
        parts = [fields.get(key) for key in ("RssAnon", "RssShmem", "VmSwap")]
        return None if parts[0] is None else sum(part or 0 for part in parts)

    def _group_left_bytes(self) -> int | None:
        limit, used = self._group_number("memory.max"), self._group_number("memory.current")
        if limit is None or used is None:
            return None
        # The file cache counts as used, but is given up before anything fails.
        return max(0, limit - used + self._group_file_bytes())

    def _group_file_bytes(self) -> int:
        try:
            lines = (self._root / "sys/fs/cgroup/memory.stat").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)

    def _group_number(self, name: str) -> int | None:
        try:
            return int((self._root / "sys/fs/cgroup" / name).read_text())
        except (OSError, ValueError):  # no control group, or "max"
            return None

    def _fields(self, name: str) -> dict[str, int]:
        """Lines such as ``MemTotal:  24576 kB`` as bytes."""
        try:
            lines = (self._root / name).read_text().splitlines()
        except OSError:
            return {}
        rows = [line.replace(":", " ").split() for line in lines if line.endswith(" kB")]
        return {row[0]: int(row[1]) * _KIB for row in rows}


class MacReader:
    """The kernel's pressure level, its share of free memory, and the footprint that Activity Monitor shows.

    ``libc`` stands for the system library; tests pass another.
    """

    def __init__(self, libc: ctypes.CDLL | None = None, total_bytes: int | None = None) -> None:
        self._libc = libc or ctypes.CDLL(ctypes.util.find_library("c"))
        self._total_bytes = total_bytes or psutil.virtual_memory().total

    @property
    def total_bytes(self) -> int:
        """The machine's memory."""
        return self._total_bytes

    def read(self) -> MemoryReading:
        """One reading."""
        level = self._sysctl("kern.memorystatus_vm_pressure_level")
        free_percent = self._sysctl("kern.memorystatus_level")
        return MemoryReading(
            pressure=None if level is None else _MAC_PRESSURE.get(level),
            available_bytes=None if free_percent is None else self._total_bytes * free_percent // 100,
            footprint_bytes=self._footprint_bytes(),
        )

    def _sysctl(self, name: str) -> int | None:
        value, length = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        failed = self._libc.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(length), None, 0)
        return None if failed else value.value

    def _footprint_bytes(self) -> int | None:
        usage = _RusageInfoV0()
        failed = self._libc.proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V0, ctypes.byref(usage))
        return None if failed else int(usage.phys_footprint)


class _RusageInfoV0(ctypes.Structure):
    """``struct rusage_info_v0`` of sys/resource.h."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("user_time", ctypes.c_uint64),
        ("system_time", ctypes.c_uint64),
        ("pkg_idle_wkups", ctypes.c_uint64),
        ("interrupt_wkups", ctypes.c_uint64),
        ("pageins", ctypes.c_uint64),
        ("wired_size", ctypes.c_uint64),
        ("resident_size", ctypes.c_uint64),
        ("phys_footprint", ctypes.c_uint64),
        ("proc_start_abstime", ctypes.c_uint64),
        ("proc_exit_abstime", ctypes.c_uint64),
    )


def system_reader(platform: str = sys.platform) -> SystemReader:
    """The reader of the operating system that runs."""
    readers: dict[str, Callable[[], SystemReader]] = {"darwin": MacReader, "linux": LinuxReader}
    return readers[platform]()


def read_machine(working_set_bytes: int | None = None, max_buffer_bytes: int | None = None) -> MachineMemory:
    """The machine now. Metal's two limits are passed in by those who may ask MLX."""
    reader = system_reader()
    reading = reader.read()
    return MachineMemory(
        reader.total_bytes, reading.available_bytes, reading.footprint_bytes, working_set_bytes, max_buffer_bytes
    )
