"""Chooses the device that MLX computes on, and states facts about it.

Owns: backend choice and its refusal, the process-wide settings each backend wants, device facts, the measured BLAS
rate. Must not know: models, pools, steps.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal, cast

import mlx.core as mx
import psutil

from engine.errors import ConfigError
from engine.mlx_backend import blas

Backend = Literal["metal", "cuda", "cpu"]

# glibc's mallopt parameters (malloc.h). Freed buffers above these sizes go back to the kernel, and each step would
# take them again as fresh zeroed pages.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
_SGEMM_SIDE = 384


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What this machine computes on. ``working_set_bytes``: what the GPU may keep resident, None on the CPU."""

    backend: Backend
    name: str
    memory_bytes: int
    working_set_bytes: int | None
    mlx_version: str
    blas: str | None

    @property
    def description(self) -> str:
        """One line for people."""
        parts = (f"{self.backend} ({self.name})", f"mlx {self.mlx_version}", self.blas)
        return ", ".join(part for part in parts if part)


def choose_backend(asked: str) -> Backend:
    """The backend for ``asked`` ("auto", "metal", "cuda" or "cpu"). Raises ConfigError when it is not there."""
    available: list[Backend] = ["cpu"]
    if mx.cuda.is_available():
        available.insert(0, "cuda")
    if mx.metal.is_available():
        available.insert(0, "metal")
    if asked == "auto":
        return available[0]
    if asked not in available:
        raise ConfigError(
            f"Backend {asked!r} is not available: MLX offers {', '.join(available)} on this machine.",
            "write `backend: auto`, or install MLX's build for that device (extra `cuda` on Linux)",
        )
    return asked


def use_backend(backend: Backend) -> None:
    """Make ``backend`` the default device of the calling thread's work and set what it wants process-wide."""
    mx.set_default_device(mx.Device(mx.cpu if backend == "cpu" else mx.gpu, 0))
    if backend == "cpu" and sys.platform == "linux":
        _keep_freed_memory()


def shortcomings(backend: Backend) -> tuple[str, ...]:
    """Why ``backend`` is slower here than it could be, in sentences for the status."""
    if backend != "cpu" or sys.platform != "linux":
        return ()
    found = []
    if not (state := blas.load()).optimised:
        found.append(f"Matrix products run on MLX's reference BLAS, some twenty times slower: {state.detail}.")
    if shutil.which("g++") is None:
        found.append("Fused kernels are off: MLX builds them with g++, which is not installed.")
    return tuple(found)


@functools.cache
def _keep_freed_memory() -> None:
    """Let malloc keep what a step frees. MLX's CPU backend has no buffer cache: gathers ran 3 to 8 times slower."""
    mallopt = cast("Callable[[int, int], int] | None", getattr(ctypes.CDLL(None), "mallopt", None))
    if mallopt is not None:  # glibc only
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def device_facts(backend: Backend) -> DeviceFacts:
    """Facts of ``backend`` on this machine."""
    info = mx.device_info()
    working_set = info.get("max_recommended_working_set_size") if backend != "cpu" else None
    return DeviceFacts(
        backend=backend,
        name=str(info.get("device_name") or platform.processor() or platform.machine()),
        memory_bytes=int(info.get("memory_size") or psutil.virtual_memory().total),
        working_set_bytes=None if working_set is None else int(working_set),
        mlx_version=version("mlx"),
        blas=blas.describe(measure_sgemm_gflops()) if backend == "cpu" else None,
    )


@functools.cache
def measure_sgemm_gflops() -> float:
    """Rate of MLX's fp32 matrix product on the CPU: near 4 per core means that the reference BLAS answered."""
    with mx.stream(mx.Device(mx.cpu, 0)):
        a = mx.full((_SGEMM_SIDE, _SGEMM_SIDE), 0.5)
        mx.eval(a, a @ a)
        elapsed_s = min(_seconds_of(lambda: mx.eval(a @ a)) for _ in range(3))
    return 2 * _SGEMM_SIDE**3 / elapsed_s / 1e9


def _seconds_of(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
