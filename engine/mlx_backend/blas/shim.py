"""Builds the small library that gives scipy's OpenBLAS its usual symbol names.

Owns: the C text, where the built file is kept, the compiler call. Must not know: MLX, or when the library is loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_PACKAGE = "scipy_openblas32"
_COMPILE_TIMEOUT_S = 60

# The wheel's library prefixes every symbol with scipy_; MLX calls these three by their plain names. LAPACK stays MLX's
# own: no language model needs it. A product with one row is handed on as matrix times vector, which reads the matrix
# once instead of packing it first: 1.4 to 3 times faster for the widths of a decoding step of one request.
_SOURCE = """\
#include <string.h>
enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

#define REAL(GEMM, GEMV, T)                                                                                    \\
    void scipy_cblas_##GEMM(int, int, int, int, int, int, T, const T *, int, const T *, int, T, T *, int);     \\
    void scipy_cblas_##GEMV(int, int, int, int, T, const T *, int, const T *, int, T, T *, int);               \\
    void cblas_##GEMM(int order, int ta, int tb, int m, int n, int k, T alpha, const T *a, int lda,            \\
                      const T *b, int ldb, T beta, T *c, int ldc) {                                            \\
        if (order != ROW_MAJOR || m != 1) {                                                                    \\
            scipy_cblas_##GEMM(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                   \\
            return;                                                                                            \\
        }                                                                                                      \\
        int step = ta == NO_TRANS ? 1 : lda;                                                                   \\
        if (beta == 0) memset(c, 0, (size_t)n * sizeof(T)); /* what is there may be NaN */                     \\
        if (tb == TRANS)                                                                                       \\
            scipy_cblas_##GEMV(order, NO_TRANS, n, k, alpha, b, ldb, a, step, beta, c, 1);                     \\
        else                                                                                                   \\
            scipy_cblas_##GEMV(order, TRANS, k, n, alpha, b, ldb, a, step, beta, c, 1);                        \\
    }
#define COMPLEX(GEMM)                                                                                          \\
    void scipy_cblas_##GEMM(int, int, int, int, int, int, const void *, const void *, int, const void *, int,  \\
                            const void *, void *, int);                                                        \\
    void cblas_##GEMM(int order, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,        \\
                      int lda, const void *b, int ldb, const void *beta, void *c, int ldc) {                   \\
        scipy_cblas_##GEMM(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                       \\
    }
REAL(sgemm, sgemv, float)
REAL(dgemm, dgemv, double)
COMPLEX(cgemm)
"""


class ShimError(Exception):
    """The shim is not there and cannot be built; the message says why and what would help."""


def wheel_library() -> Path | None:
    """The OpenBLAS of the scipy-openblas32 wheel, or None when the wheel is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "lib" / "libscipy_openblas.so"
    return path if path.exists() else None


def find_or_build(library: Path) -> Path:
    """The shim for ``library``, built on first use. Raises ShimError."""
    folders = _cache_folders()
    # The library's place is compiled in, so it is part of the name: a moved environment builds its own.
    name = f"libblas-shim-{hashlib.sha256(f'{library}{_SOURCE}'.encode()).hexdigest()[:12]}.so"
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    compiler = next(
        (found for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and (found := shutil.which(c))), None
    )
    if compiler is None:
        raise ShimError(
            "scipy's OpenBLAS needs a C compiler once and there is none; install one (Debian: apt install gcc)"
        )
    for folder in folders:
        if _writable(folder):
            return _compile(compiler, library, folder / name)
    raise ShimError(f"neither {folders[0]} nor {folders[1]} can be written")


def _cache_folders() -> tuple[Path, Path]:
    user_cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(sys.prefix) / "lib" / "metalslots", Path(user_cache) / "metalslots"


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _compile(compiler: str, library: Path, target: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        source, built = Path(work) / "shim.c", Path(work) / target.name
        source.write_text(_SOURCE)
        command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(built)]
        command += [f"-L{library.parent}", "-lscipy_openblas", f"-Wl,-rpath,{library.parent}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ShimError(f"{compiler} failed: {error}") from error
        if done.returncode != 0:
            raise ShimError(f"{compiler} failed: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
        os.replace(built, target)  # several processes may build at once: the last one wins, all are equal
    return target
