"""Puts an optimised BLAS in front of the reference one that MLX's Linux CPU build carries.

Owns: the search (system OpenBLAS, then the scipy-openblas32 wheel through a shim), the loading, the report. Must not
know: MLX, which must not be loaded before this has run. On macOS MLX uses Accelerate and there is nothing to do.

A library opened with RTLD_GLOBAL comes before a later library's own dependencies in symbol look-up, so MLX's calls of
``cblas_sgemm`` bind to it. Measured on two cores: 4 -> 100 GFLOP/s in fp32.

Environment: METALSLOTS_BLAS names a library with plain cblas symbols to use instead, or is "off";
OPENBLAS_NUM_THREADS (default 1: a second spinning thread fights Python for its core).
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from dataclasses import dataclass
from typing import Protocol, cast

from engine.mlx_backend.blas import shim

_SYSTEM_NAMES = ("libopenblas.so.0", "libopenblas.so")
_OVERRIDE = "METALSLOTS_BLAS"
_THREADS = "OPENBLAS_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class BlasState:
    """Which BLAS answers MLX's calls. ``path`` None: MLX's own, for the reason in ``detail``."""

    name: str
    path: str | None
    detail: str = ""

    @property
    def optimised(self) -> bool:
        """Whether a BLAS was put in front of MLX's own."""
        return self.path is not None


class _CFunction(Protocol):
    argtypes: list[type]
    restype: type | None

    def __call__(self) -> object: ...


@functools.cache
def load() -> BlasState:
    """Load the best BLAS of this machine, once. Never raises: without one the engine is right, but slow."""
    if sys.platform != "linux":
        return BlasState("Accelerate" if sys.platform == "darwin" else "MLX's own", None, "nothing to put in front")
    override = os.environ.get(_OVERRIDE, "")
    if override == "off":
        return BlasState("MLX's own (reference)", None, f"{_OVERRIDE}=off")
    if "mlx.core" in sys.modules:
        return BlasState("MLX's own (reference)", None, "MLX was imported before engine.mlx_backend")
    os.environ.setdefault(_THREADS, "1")  # read by the library when it is loaded
    if override:
        return _open(override) or BlasState("MLX's own (reference)", None, f"{override} has no usable cblas_sgemm")
    for name in _SYSTEM_NAMES:
        if (state := _open(name)) is not None:
            return state
    return _open_wheel()


def describe(gflops: float | None = None) -> str:
    """One line for doctor, start log and status. ``gflops``: a measured rate of MLX's fp32 products."""
    state = load()
    rate = f", {gflops:.0f} GFLOP/s measured" if gflops is not None else ""
    threads = f", {os.environ.get(_THREADS)} thread(s)" if state.optimised else ""
    detail = f" ({state.detail})" if state.detail else ""
    return f"BLAS: {state.name}{threads}{rate}{detail}"


def preload_env() -> dict[str, str]:
    """Environment for another program (say ``python -m mlx_lm.server``) to run MLX on the same BLAS."""
    state = load()
    if state.path is None:
        return {}
    return {"LD_PRELOAD": state.path, _THREADS: os.environ.get(_THREADS, "1")}


def _open_wheel() -> BlasState:
    library = shim.wheel_library()
    if library is None:
        return BlasState("MLX's own (reference)", None, "no libopenblas here; install scipy-openblas32 or libopenblas0")
    try:
        path = shim.find_or_build(library)
    except shim.ShimError as error:
        return BlasState("MLX's own (reference)", None, str(error))
    return _open(str(path)) or BlasState("MLX's own (reference)", None, f"{path} cannot be loaded")


def _open(name: str) -> BlasState | None:
    """Load ``name`` for all later libraries to see. None when it is not there or is no cblas."""
    try:
        library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        library.cblas_sgemm  # noqa: B018 - the look-up raises when the symbol is missing
    except (OSError, AttributeError):
        return None
    return BlasState(_version(library), _path_of(library, name))


def _version(library: ctypes.CDLL) -> str:
    for symbol in ("openblas_get_config", "scipy_openblas_get_config"):
        function = cast("_CFunction | None", getattr(library, symbol, None))
        if function is not None:
            function.argtypes, function.restype = [], ctypes.c_char_p
            config = cast(bytes, function()).decode().split()
            core = [word for word in config[2:] if "_" not in word and not word.isupper()]
            return " ".join(config[:2] + core)
    return "an unnamed BLAS"


def _path_of(library: ctypes.CDLL, name: str) -> str:
    """The file behind ``library``: LD_PRELOAD of another process needs a path, not a name."""

    class _DlInfo(ctypes.Structure):
        _fields_ = (
            ("file_name", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("symbol_name", ctypes.c_char_p),
            ("symbol", ctypes.c_void_p),
        )

    info = _DlInfo()
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes, dladdr.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    address = ctypes.cast(library.cblas_sgemm, ctypes.c_void_p)
    found = dladdr(address, ctypes.byref(info))
    return info.file_name.decode() if found and info.file_name else name
