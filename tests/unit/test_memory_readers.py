"""Memory readers: Linux from files as the kernel writes them, macOS against a stand-in of its calls, this machine."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.core.memory_readers import LinuxReader, MacReader, read_machine, system_reader
from engine.memory.guard import MemoryReading, Pressure

KIB, MIB, GIB = 2**10, 2**20, 2**30

MEMINFO = (
    "MemTotal:       16777216 kB\nMemFree:         1000000 kB\nMemAvailable:    8388608 kB\nHugePages_Total:       0\n"
)
STATUS = (
    "Name:\tpython\nVmRSS:\t 3000000 kB\nRssAnon:\t 2097152 kB\nRssFile:\t  500000 kB\n"
    "RssShmem:\t 1024 kB\nVmSwap:\t 2048 kB\n"
)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", MEMINFO)
    write(tmp_path / "proc/self/status", STATUS)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_linux_counts_what_is_charged_and_not_mapped_files(machine: Path) -> None:
    reader = LinuxReader(machine)
    assert reader.read() == MemoryReading(None, 8 * GIB, 2 * GIB + 3 * MIB)
    assert reader.total_bytes == 16 * GIB


def test_linux_respects_its_control_group(machine: Path) -> None:
    group = machine / "sys/fs/cgroup"
    write(group / "memory.max", f"{4 * GIB}\n")
    write(group / "memory.current", f"{3 * GIB}\n")
    write(group / "memory.stat", f"anon {2 * GIB}\ninactive_file {GIB // 2}\nactive_file 1\n")
    reader = LinuxReader(machine)
    assert reader.read().available_bytes == GIB + GIB // 2
    assert reader.total_bytes == 4 * GIB
    write(group / "memory.max", "max\n")
    assert reader.read().available_bytes == 8 * GIB
    assert reader.total_bytes == 16 * GIB


def test_linux_unknown_stays_unknown(tmp_path: Path) -> None:
    assert LinuxReader(tmp_path).read() == MemoryReading(None, None, None)


class StandInForMacos:
    """Answers the two calls as their manual pages say; a name it does not know fails with -1."""

    def __init__(self, values: dict[bytes, int], footprint_bytes: int | None) -> None:
        self._values = values
        self._footprint_bytes = footprint_bytes

    def sysctlbyname(self, name: bytes, value: Any, length: Any, new: None, new_length: int) -> int:
        if name not in self._values:
            return -1
        assert length._obj.value == ctypes.sizeof(value._obj)
        value._obj.value = self._values[name]
        return 0

    def proc_pid_rusage(self, pid: int, flavor: int, buffer: Any) -> int:
        if self._footprint_bytes is None:
            return -1
        # Bytes 72 to 80: uuid, five counters, wired and resident sizes come before.
        number = ctypes.c_uint64(self._footprint_bytes)
        ctypes.memmove(ctypes.addressof(buffer._obj) + 16 + 7 * 8, ctypes.byref(number), 8)
        return 0


@pytest.mark.parametrize(
    ("level", "pressure"), [(1, Pressure.NORMAL), (2, Pressure.WARNING), (4, Pressure.CRITICAL), (3, None)]
)
def test_macos(level: int, pressure: Pressure | None) -> None:
    values = {b"kern.memorystatus_vm_pressure_level": level, b"kern.memorystatus_level": 25}
    reader = MacReader(StandInForMacos(values, 5 * GIB), total_bytes=64 * GIB)  # type: ignore[arg-type]
    assert reader.read() == MemoryReading(pressure, 16 * GIB, 5 * GIB)
    assert reader.total_bytes == 64 * GIB


def test_macos_unknown_stays_unknown() -> None:
    reader = MacReader(StandInForMacos({}, None), total_bytes=64 * GIB)  # type: ignore[arg-type]
    assert reader.read() == MemoryReading(None, None, None)


def test_this_machine_can_be_read_and_notices_what_this_process_takes() -> None:
    reader = system_reader()
    before = reader.read()
    assert before.available_bytes is not None
    assert before.footprint_bytes is not None
    assert 0 < before.footprint_bytes < psutil.virtual_memory().total
    # Pages of its own: what the allocator hands out may have been this process's before.
    with mmap.mmap(-1, 64 * MIB) as block:
        block.write(b"\1" * len(block))
        after = reader.read()
    assert after.footprint_bytes is not None
    assert 60 * MIB < after.footprint_bytes - before.footprint_bytes < 80 * MIB
    machine = read_machine()
    assert machine.foreign_bytes is not None
    assert machine.total_bytes <= psutil.virtual_memory().total
