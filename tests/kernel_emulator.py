"""Runs the kernels' own text on the CPU: a kernel factory for ``PagedKernels`` that builds C++ and calls it.

The text is put behind ``prelude_cpp.h``, which gives each GPU thread a fiber, and compiled by the system's C++
compiler once per set of constants. The signature is the one that MLX generates for Metal.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.mlx_backend.kernels.dialect import SOURCE, Buffer, KernelText
from engine.mlx_backend.kernels.launch import Groups, buffer_dtypes

COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
# -O1: a kernel is compiled for longer than it runs.
_FLAGS = ("-std=gnu++17", "-O1", "-fPIC", "-U_FORTIFY_SOURCE", "-fno-stack-protector", "-w")
PRELUDE = SOURCE / "prelude_cpp.h"
BUFFER_TYPES = {"half": "Half", "word": "Word", "float": "float", "int": "int"}
"""The preludes' names of the types that no template decides."""
_CPP_TYPES = {mx.float32: "float", mx.float16: "float16", mx.bfloat16: "bfloat16", mx.uint32: "Word"}


class Emulator:
    """Builds kernels into ``folder`` and runs them with threads in an order drawn from ``seed``."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.seed = folder, seed
        self.num_launches = 0

    def __call__(
        self, text: KernelText, dtype: mx.Dtype, pool_dtype: mx.Dtype, constants: Mapping[str, int]
    ) -> EmulatedKernel:
        """The factory that ``PagedKernels`` asks for."""
        return EmulatedKernel(self, text, dtype, pool_dtype, constants)

    def build(self, source: str) -> ctypes.CDLL:
        """The shared library of ``source``; built once per text."""
        prelude = self._precompiled_prelude()
        stem = self.folder / hashlib.sha256(source.encode()).hexdigest()[:16]
        library = stem.with_suffix(".so")
        if not library.exists():
            stem.with_suffix(".cpp").write_text(source)
            _compile("-shared", "-include", str(prelude), str(stem.with_suffix(".cpp")), "-o", str(library))
        return ctypes.CDLL(str(library))

    def _precompiled_prelude(self) -> Path:
        """The prelude beside its compiled form, which GCC takes instead: the standard library is read once."""
        prelude = self.folder / PRELUDE.name
        if not prelude.exists():
            prelude.write_text(PRELUDE.read_text(encoding="utf-8"), encoding="utf-8")
            _compile("-x", "c++-header", str(prelude), "-o", f"{prelude}.gch")
        return prelude


def _compile(*arguments: str) -> None:
    assert COMPILER is not None
    done = subprocess.run([COMPILER, *_FLAGS, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]


class EmulatedKernel:
    """One kernel; pools given to it are changed in place, as on a GPU."""

    def __init__(
        self,
        emulator: Emulator,
        text: KernelText,
        dtype: mx.Dtype,
        pool_dtype: mx.Dtype,
        constants: Mapping[str, int],
    ) -> None:
        assert set(constants) == set(text.constants), f"{text.name}: constants {sorted(constants)}"
        self._emulator, self._text = emulator, text
        self._dtypes = buffer_dtypes(dtype, pool_dtype)
        self._source = cpp_source(text, _CPP_TYPES[dtype], _CPP_TYPES[pool_dtype], constants)
        self._library: ctypes.CDLL | None = None

    def __call__(
        self, *inputs: mx.array, groups: Groups, num_threads: int, output_shapes: Sequence[Sequence[int]]
    ) -> list[mx.array]:
        if self._library is None:
            self._library = self._emulator.build(self._source)
        for buffer, array in zip(self._text.inputs, inputs, strict=True):
            assert array.dtype == self._dtypes[buffer.type], f"{self._text.name}: {buffer.name} is {array.dtype}"
        # What a kernel does not write must not look right: outputs start as NaN or a large negative number.
        outputs = [
            mx.full(tuple(shape), float("nan") if buffer.type != "int" else -(2**30), self._dtypes[buffer.type])
            for buffer, shape in zip(self._text.outputs, output_shapes, strict=True)
        ]
        arrays = [*map(mx.contiguous, inputs), *outputs]
        mx.eval(arrays)
        numbers = [_numbers(array) for array in arrays]
        fenced = [_Fenced(array) for array in numbers]
        addresses = (ctypes.c_void_p * len(arrays))(*(copy.address for copy in fenced))
        shapes = [(ctypes.c_int * max(1, array.ndim))(*array.shape) for array in arrays]
        shape_pointers = (ctypes.POINTER(ctypes.c_int) * len(arrays))(*shapes)
        run = self._library.run
        run.restype = ctypes.c_char_p
        self._emulator.num_launches += 1
        seed = self._emulator.seed + self._emulator.num_launches
        error = run(addresses, shape_pointers, (ctypes.c_int * 3)(*groups), num_threads, ctypes.c_uint(seed))
        assert error is None, f"{self._text.name}: {error.decode()}"
        for index, (array, copy) in enumerate(zip(numbers, fenced, strict=True)):
            assert copy.fences_stand(), f"{self._text.name}: wrote outside argument {index}"
            ctypes.memmove(array.ctypes.data, copy.address, array.nbytes)
        return outputs


class _Fenced:
    """A copy of an array as a GPU would hold it: aligned, and here with fences of known bytes on both sides."""

    _FENCE_BYTES = 256

    def __init__(self, array: npt.NDArray[Any]) -> None:
        fence = self._FENCE_BYTES
        self._room = np.full(array.nbytes + 3 * fence, 0xFF, np.uint8)
        self._first = fence + -(self._room.ctypes.data + fence) % fence
        self._last = self._first + array.nbytes
        self._room[self._first : self._last] = array.reshape(-1).view(np.uint8)
        self.address = self._room.ctypes.data + self._first

    def fences_stand(self) -> bool:
        """Whether nothing was written around the array."""
        return bool((self._room[: self._first] == 0xFF).all() and (self._room[self._last :] == 0xFF).all())


def _numbers(array: mx.array) -> npt.NDArray[Any]:
    """``array``'s own memory, not a copy: pools are changed in place."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def cpp_source(text: KernelText, dtype: str, pool_dtype: str, constants: Mapping[str, int]) -> str:
    """A C++ file with one entry point ``run``, to be compiled behind the prelude."""
    types = {"T": dtype, "P": pool_dtype, **BUFFER_TYPES}
    body = text.body("cpp")
    parameters, arguments = [], []
    for index, buffer in enumerate((*text.inputs, *text.outputs)):
        const = "const " if buffer in text.inputs else ""
        parameters.append(f"{const}{BUFFER_TYPES.get(buffer.type, buffer.type)}* {buffer.name}")
        arguments.append(f"({const}{types[buffer.type]}*)buffers[{index}]")
        if names_shape(body, buffer):
            parameters.append(f"const int* {buffer.name}_shape")
            arguments.append(f"shapes[{index}]")
    template = ", ".join(["typename T", "typename P", *(f"int {name}" for name in text.constants)])
    values = ", ".join([dtype, pool_dtype, *(str(constants[name]) for name in text.constants)])
    common = text.header("cpp").removeprefix(PRELUDE.read_text(encoding="utf-8"))
    return f"""{common}
template <{template}>
static void {text.name}({", ".join(parameters)}) {{
{body}
}}
static void** buffers;
static int** shapes;
static void thread() {{ {text.name}<{values}>({", ".join(arguments)}); }}
extern "C" const char* run(void** b, int** s, const int* groups, int num_threads, unsigned seed) {{
  buffers = b;
  shapes = s;
  return emulator::launch(thread, groups, num_threads, seed);
}}
"""


def names_shape(body: str, buffer: Buffer) -> bool:
    """Whether the text asks for the buffer's dimensions; MLX searches for the same name."""
    return re.search(rf"\b{buffer.name}_shape\b", body) is not None
