"""The kernels' CUDA text, checked by the system's C++ compiler as far as that goes: names, types, templates."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import engine.mlx_backend  # noqa: F401  (loads the BLAS before MLX)
from engine.mlx_backend.kernels.dialect import ALL_TEXTS, KernelText
from tests.kernel_emulator import BUFFER_TYPES, COMPILER, names_shape
from tests.mlx.test_kernels_metal_text import CONSTANTS

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

STUB = Path(__file__).parent.parent / "cuda_stub.h"
TYPES = {"T": "__nv_bfloat16", "P": "__half", **BUFFER_TYPES}


def cuda_source(text: KernelText) -> str:
    """The file that MLX would hand to CUDA's compiler."""
    body = text.body("cuda")
    parameters = []
    for buffer in text.inputs:
        parameters.append(f"const {TYPES[buffer.type]}* {buffer.name}")
        if names_shape(body, buffer):
            parameters.append(f"const int* {buffer.name}_shape")
    parameters += [f"{TYPES[buffer.type]}* {buffer.name}" for buffer in text.outputs]
    constants = "\n".join(f"  constexpr int {name} = {CONSTANTS[name]};" for name in text.constants)
    return f"""{text.header("cuda")}
__global__ void {text.name}({", ".join(parameters)}) {{
  using T = {TYPES["T"]};
  using P = {TYPES["P"]};
{constants}
{body}
}}
"""


@pytest.mark.parametrize("text", ALL_TEXTS, ids=lambda text: text.name)
def test_cuda_text_compiles(text: KernelText) -> None:
    assert COMPILER is not None
    command = [COMPILER, "-x", "c++", "-std=c++17", "-fsyntax-only", "-w", "-include", str(STUB), "-"]
    done = subprocess.run(command, input=cuda_source(text), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
