"""Checks the kernels' Metal text with clang, without a Mac: address spaces, overloads, the C++ that Metal knows.

``metal_stub.h`` stands in for Metal's library. The signature is generated as MLX generates it (arrays of fewer than
eight numbers come as ``constant``), and the template is instantiated as MLX does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from engine.mlx_backend.kernels.dialect import KernelText

CLANG = shutil.which("clang++") or shutil.which("clang")
STUB = Path(__file__).parent / "metal_stub.h"
# aarch64 only because clang has both 16-bit floats there; MSL 3 is C++14 without exceptions, RTTI and libraries.
_FLAGS = (
    *("-x", "c++", "-std=c++14", "--target=aarch64-linux-gnu", "-fsyntax-only", "-nostdinc", "-fno-exceptions"),
    *("-fno-rtti", "-Werror", "-Wno-unknown-attributes", "-Wno-unused-parameter", "-Wno-pass-failed"),
    *("-Wno-ignored-attributes", "-Wno-overloaded-virtual"),
)
_TYPES = {"T": "T", "P": "P", "half": "half", "word": "uint32_t", "float": "float", "int": "int32_t"}
_ATTRIBUTES = {
    "simdgroup_index_in_threadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
}
# What clang's C++ has and Metal's has not: words, and pointers or references that name no address space.
_WORDS = re.compile(r"\b(?:double|long\s+long|goto|try|throw|virtual|new|delete|typeid|dynamic_cast|thread_local)\b")
_POINTERS = re.compile(
    r"(?<!device )(?<!thread )(?<!constant )(?<!threadgroup )(?<!const )(?<!DEVICE )(?<!THREAD )(?<!SHARED )"
    r"\b(?:T|P|Type|float|int|int32_t|bool|half|Half|Word|Offset)\s*[*&]\s*[\w)]"
)


def problems(text: KernelText, dtype: str, pool_dtype: str, constants: Mapping[str, int], small: frozenset[str]) -> str:
    """What is wrong with ``text`` on Metal; empty if nothing. ``small`` inputs have fewer than eight numbers."""
    assert CLANG is not None
    source = metal_source(text, dtype, pool_dtype, constants, small)
    plain = re.sub(r"//[^\n]*", "", source[: source.index("\ntemplate void ")])
    found = [f"not in Metal: {match.group()}" for match in _WORDS.finditer(plain)]
    found += [f"no address space: {match.group()}" for match in _POINTERS.finditer(plain)]
    command = [CLANG, *_FLAGS, "-include", str(STUB), "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    return "\n".join([*found, done.stderr if done.returncode else ""]).strip()


def metal_source(
    text: KernelText, dtype: str, pool_dtype: str, constants: Mapping[str, int], small: frozenset[str] = frozenset()
) -> str:
    """The file that MLX would hand to Metal's compiler."""
    # clang wants static storage for a variable in an address space.
    body = text.body("metal").replace("SHARED_ARRAY(", "static SHARED_ARRAY(")
    parameters = []
    for buffer in text.inputs:
        space = "constant" if buffer.name in small else "device"
        parameters.append(f"const {space} {_TYPES[buffer.type]}* {buffer.name} [[buffer({len(parameters)})]]")
        if f"{buffer.name}_shape" in body:
            parameters.append(f"const constant int* {buffer.name}_shape [[buffer({len(parameters)})]]")
    for buffer in text.outputs:
        parameters.append(f"device {_TYPES[buffer.type]}* {buffer.name} [[buffer({len(parameters)})]]")
    assert len(parameters) <= 31, f"{text.name} has {len(parameters)} buffers; Metal allows 31"
    parameters += [f"{kind} {name} [[{name}]]" for name, kind in _ATTRIBUTES.items() if name in body]
    template = ", ".join(["typename T", "typename P", *(f"int {name}" for name in text.constants)])
    values = ", ".join([dtype, pool_dtype, *(str(constants[name]) for name in text.constants)])
    return f"""{text.header("metal")}
template <{template}>
[[kernel]] void {text.name}({", ".join(parameters)}) {{
{body}
}}
template void {text.name}<{values}>({", ".join(_plain(parameters, dtype, pool_dtype))});
"""


def _plain(parameters: list[str], dtype: str, pool_dtype: str) -> list[str]:
    """Parameter types of the instantiation: no names, no attributes, the template's types filled in."""
    types = {"T": dtype, "P": pool_dtype}
    kept = [re.sub(r" ?\w+ \[\[.*", "", parameter) for parameter in parameters]
    return [re.sub(r"\b([TP])\b", lambda match: types[match.group()], parameter) for parameter in kept]
