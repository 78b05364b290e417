"""The BLAS in front of MLX's own: found, built, loaded first, disclosed. Each case is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.mlx_backend import blas
from engine.mlx_backend.blas import shim

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs another BLAS")

REPORT = "from engine.mlx_backend import device, blas; print(device.measure_sgemm_gflops(), blas.describe(), sep='|')"


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


@linux
def test_mlx_computes_on_the_optimised_blas_and_says_so() -> None:
    fast_gflops, description = run(REPORT).split("|")
    slow_gflops, slow_description = run(REPORT, METALSLOTS_BLAS="off").split("|")
    assert float(fast_gflops) > 3 * float(slow_gflops)
    assert "OpenBLAS" in description
    assert "reference" in slow_description
    assert "METALSLOTS_BLAS=off" in slow_description


@linux
def test_a_preloaded_program_runs_on_the_same_blas() -> None:
    code = (
        "import time, mlx.core as mx\n"
        "a = mx.full((384, 384), 0.5); mx.eval(a, a @ a)\n"
        "t = time.perf_counter(); mx.eval(a @ a); print(2 * 384**3 / (time.perf_counter() - t) / 1e9)"
    )
    assert float(run(code, **blas.preload_env())) > 3 * float(run(code))


@linux
def test_products_are_right_in_every_type_that_is_forwarded() -> None:
    code = (
        "import engine.mlx_backend, mlx.core as mx, numpy as np\n"
        "mx.set_default_device(mx.cpu)\n"
        "rng = np.random.default_rng(0)\n"
        "for dtype in (np.float32, np.float64, np.complex64):\n"
        "    i = 1j if dtype == np.complex64 else 0\n"
        "    a = (rng.normal(size=(5, 7)) + i * rng.normal(size=(5, 7))).astype(dtype)\n"
        "    b = (rng.normal(size=(7, 3)) + i * rng.normal(size=(7, 3))).astype(dtype)\n"
        "    kinds = {np.float64: mx.float64}\n"
        "    c = mx.array(a, kinds.get(dtype)) @ mx.array(b, kinds.get(dtype))\n"
        "    assert np.abs(np.array(c) - a @ b).max() < 1e-4, dtype\n"
        "print('right')"
    )
    assert run(code) == "right"


@linux
def test_an_mlx_that_came_first_is_disclosed() -> None:
    code = "import mlx.core; from engine.mlx_backend import blas; print(blas.describe())"
    assert "MLX was imported before" in run(code)


@linux
def test_a_library_without_cblas_is_not_taken(tmp_path: Path) -> None:
    code = "from engine.mlx_backend import blas; print(blas.describe())"
    assert "has no usable cblas_sgemm" in run(code, METALSLOTS_BLAS="libm.so.6")


@linux
def test_the_threads_asked_for_are_kept() -> None:
    code = "from engine.mlx_backend import blas; print(blas.describe())"
    assert "2 thread(s)" in run(code, OPENBLAS_NUM_THREADS="2")


@linux
def test_the_command_builds_and_reports() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine.mlx_backend.blas", "build"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("BLAS: OpenBLAS")
    assert done.stderr == ""


@linux
def test_the_shim_is_built_once_and_a_missing_compiler_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = shim.wheel_library()
    if library is None:
        pytest.skip("the scipy-openblas32 wheel is not installed")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(shim.ShimError, match="install one"):
        shim.find_or_build(library)
    monkeypatch.undo()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    built = shim.find_or_build(library)
    assert built.is_relative_to(tmp_path)
    stamp = built.stat().st_mtime_ns
    assert shim.find_or_build(library) == built
    assert built.stat().st_mtime_ns == stamp


def test_importing_mlx_lm_leaves_the_limit_of_open_files_alone() -> None:
    code = (
        "import resource; before = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "import engine.mlx_backend.mlx_lm_parts; after = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "print(after[1] == before[1] and after[0] >= min(before[0], 4096))"
    )
    assert run(code) == "True"
