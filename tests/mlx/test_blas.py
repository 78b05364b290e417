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


PRODUCTS = """
import engine.mlx_backend, itertools, mlx.core as mx, numpy as np
mx.set_default_device(mx.cpu)
rng = np.random.default_rng(0)
kinds = {np.float32: mx.float32, np.float64: mx.float64, np.complex64: mx.complex64}
for (dtype, kind), m, ta, tb in itertools.product(kinds.items(), (1, 2, 5, 70), (False, True), (False, True)):
    def draw(*shape):
        values = rng.normal(size=shape) + (1j * rng.normal(size=shape) if dtype is np.complex64 else 0)
        return values.astype(dtype)
    a, b = draw(*((7, m) if ta else (m, 7))), draw(*((9, 7) if tb else (7, 9)))
    x, y = mx.array(a, kind), mx.array(b, kind)
    ours = (x.T if ta else x) @ (y.T if tb else y)
    theirs = (a.T if ta else a) @ (b.T if tb else b)
    assert np.abs(np.array(ours) - theirs).max() < 1e-4, (dtype, m, ta, tb)
    if kind == mx.float32:
        bias = mx.array(draw(m, 9))
        sum_ = mx.addmm(bias, x.T if ta else x, y.T if tb else y, alpha=0.5, beta=2.0)
        assert np.abs(np.array(sum_) - (0.5 * theirs + 2 * np.array(bias))).max() < 1e-4, (m, ta, tb)
print("right")
"""


@linux
def test_products_of_all_types_shapes_and_transpositions_are_right() -> None:
    assert run(PRODUCTS) == "right"


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
