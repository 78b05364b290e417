"""The kernels' texts: one body each, in a small dialect that a prelude per target gives meaning to.

Owns: reading ``source/``, putting a kernel's text together, the fingerprint in its name. Must not know: MLX, shapes.

A body is the inside of a function, as ``mx.fast.metal_kernel`` and ``mx.fast.cuda_kernel`` want it; they generate the
signature. Rules of the dialect, so that one text is right in all places:

- pointers carry ``DEVICE`` or ``THREAD``; inputs are used by index or through ``auto`` (Metal passes arrays of fewer
  than eight numbers in another address space);
- threadgroup memory is declared with ``SHARED_ARRAY``, and ``BARRIER()`` is met by all threads of a threadgroup;
- lanes talk through ``run_sum``, ``stride_sum`` and ``stride_max`` only, met by all 32 lanes of a simdgroup, threads
  through ``group_sum`` and ``group_max``, met by all threads of a threadgroup;
- numbers are converted through ``float``; pool offsets are ``Offset`` (64 bits);
- pools are read and written by ``pool.h``'s pieces only, so that a text serves plain and packed pools (``packed``);
- an input's dimensions are ``NAME_shape[i]``; constants are the template's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

Target = Literal["metal", "cuda", "cpp"]

SOURCE = Path(__file__).parent / "source"
_COMMON = ("splits.h", "numbers.h", "groups.h", "pool.h")
_HEADERS: dict[Target, tuple[str, ...]] = {
    "metal": ("prelude_metal.h", "shuffles.h", *_COMMON),
    "cuda": ("prelude_cuda.h", "shuffles.h", *_COMMON),
    "cpp": ("prelude_cpp.h", *_COMMON),
}


@dataclass(frozen=True, slots=True)
class Buffer:
    """One array of a kernel's signature. ``type``: "T" (the model's numbers), "P" (the pool's), "half" (fp16), "word"
    (uint32), "float" or "int"."""

    name: str
    type: Literal["T", "P", "half", "word", "float", "int"]


@dataclass(frozen=True, slots=True)
class KernelText:
    """One kernel: ``parts`` are the files of its body, ``constants`` the names of its template's whole numbers."""

    name: str
    parts: tuple[str, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    constants: tuple[str, ...]

    def header(self, target: Target) -> str:
        """What stands before the function."""
        return "\n".join(_read(name) for name in _HEADERS[target])

    def body(self, target: Target) -> str:
        """What stands inside the function."""
        return "\n".join(_read(name) for name in (f"prologue_{target}.inc", *self.parts))

    def fingerprint(self, target: Target) -> str:
        """Ten hex digits of the whole text. MLX finds compiled kernels by name, so a changed text needs a new one."""
        text = self.header(target) + self.body(target) + repr((self.inputs, self.outputs, self.constants))
        return hashlib.sha256(text.encode()).hexdigest()[:10]


@cache
def _read(name: str) -> str:
    return (SOURCE / name).read_text(encoding="utf-8")


_POOLS = (Buffer("k_pool", "P"), Buffer("v_pool", "P"))
_POOL = "pool_plain.inc"
_VERSION = Buffer("version", "int")
_VERSION_OUT = Buffer("version_out", "int")
# Of one split: sums of weighted values, the highest score, the sum of weights.
_PARTIAL = (Buffer("partial", "float"), Buffer("partial_top", "float"), Buffer("partial_sum", "float"))
_DECODE_INPUTS = (
    Buffer("queries", "T"),
    Buffer("k_new", "T"),
    Buffer("v_new", "T"),
    *_POOLS,
    Buffer("block_table", "int"),
    Buffer("seq_lens", "int"),
    Buffer("scales", "float"),
    Buffer("sinks", "T"),
    _VERSION,
)
_DECODE_CONSTANTS = (
    *("D", "KV_HEADS", "HEADS", "TILES", "BLOCK", "WINDOW", "SOFT_CAP", "HAS_SINKS"),
    *("LEAST", "SIMDS", "ELEMS", "VEC", "KEYS", "BATCH", "AHEAD"),
)

DECODE_WHOLE = KernelText(
    name="paged_decode_whole",
    parts=(_POOL, "paged_decode.inc", "decode_whole.inc"),
    inputs=_DECODE_INPUTS,
    outputs=(Buffer("out", "T"), _VERSION_OUT),
    constants=_DECODE_CONSTANTS,
)
DECODE_SPLIT = KernelText(
    name="paged_decode_split",
    parts=(_POOL, "paged_decode.inc", "decode_split.inc"),
    inputs=_DECODE_INPUTS,
    outputs=(*_PARTIAL, _VERSION_OUT),
    constants=_DECODE_CONSTANTS,
)
DECODE_REDUCE = KernelText(
    name="paged_decode_reduce",
    parts=("decode_reduce.inc",),
    inputs=(*_PARTIAL, Buffer("seq_lens", "int"), Buffer("sinks", "T")),
    outputs=(Buffer("out", "T"),),
    constants=("D", "NUM_HEADS", "BLOCK", "WINDOW", "HAS_SINKS", "LEAST", "THREADS"),
)
CHUNK_WRITE = KernelText(
    name="paged_chunk_write",
    parts=(_POOL, "chunk_write.inc"),
    inputs=(Buffer("k_new", "T"), Buffer("v_new", "T"), *_POOLS, Buffer("targets", "int"), _VERSION),
    outputs=(_VERSION_OUT,),
    constants=("D", "KV_HEADS", "VEC", "THREADS"),
)
CHUNK_GATHER = KernelText(
    name="paged_chunk_gather",
    parts=(_POOL, "chunk_gather.inc"),
    inputs=(*_POOLS, Buffer("block_table", "int"), Buffer("span", "int"), _VERSION),
    outputs=(Buffer("k_out", "T"), Buffer("v_out", "T"), _VERSION_OUT),
    constants=("D", "KV_HEADS", "BLOCK", "VEC", "THREADS"),
)
BLOCK_COPY = KernelText(
    name="paged_block_copy",
    parts=("block_copy.inc",),
    inputs=(*_POOLS, Buffer("pairs", "int"), _VERSION),
    outputs=(_VERSION_OUT,),
    constants=("D", "KV_HEADS", "BLOCK", "VEC", "THREADS"),
)
SAMPLE = KernelText(
    name="sample",
    parts=("sample.inc",),
    inputs=(Buffer("logits", "T"), Buffer("settings", "float"), Buffer("limits", "int"), Buffer("keys", "int")),
    outputs=(Buffer("tokens", "int"), Buffer("broken", "int")),
    constants=("SIMDS",),
)
_CHUNK_INPUTS = (
    Buffer("queries", "T"),
    *_POOLS,
    Buffer("block_table", "int"),
    Buffer("chunks", "int"),
    Buffer("scales", "float"),
    Buffer("sinks", "T"),
    _VERSION,
)
_CHUNK_CONSTANTS = (
    *("D", "KV_HEADS", "GROUP", "BLOCK", "WINDOW", "SOFT_CAP", "HAS_SINKS"),
    *("LEAST", "KEYS", "SIMDS", "VEC"),
)
CHUNK_WHOLE = KernelText(
    name="paged_chunk_whole",
    parts=(_POOL, "chunk_attention.inc", "chunk_whole.inc"),
    inputs=_CHUNK_INPUTS,
    outputs=(Buffer("out", "T"), _VERSION_OUT),
    constants=_CHUNK_CONSTANTS,
)
CHUNK_SPLIT = KernelText(
    name="paged_chunk_split",
    parts=(_POOL, "chunk_attention.inc", "chunk_split.inc"),
    inputs=_CHUNK_INPUTS,
    outputs=(*_PARTIAL, _VERSION_OUT),
    constants=_CHUNK_CONSTANTS,
)
CHUNK_REDUCE = KernelText(
    name="paged_chunk_reduce",
    parts=("chunk_reduce.inc",),
    inputs=(*_PARTIAL, Buffer("sinks", "T")),
    outputs=(Buffer("out", "T"),),
    constants=("D", "NUM_HEADS", "HAS_SINKS", "THREADS"),
)
PROJECT = KernelText(
    name="project",
    parts=("project.inc",),
    inputs=(Buffer("x", "T"), Buffer("weight", "T")),
    outputs=(Buffer("result", "T"),),
    constants=("ROWS", "FEATS", "TURNS", "SIMDS"),
)
ROTATE = KernelText(
    name="rotate",
    parts=("rotate.inc",),
    inputs=(Buffer("joined", "T"), Buffer("positions", "int"), Buffer("frequencies", "float")),
    outputs=(Buffer("queries", "T"), Buffer("keys", "T"), Buffer("values", "T")),
    constants=("D", "HEADS", "KV_HEADS", "VEC", "THREADS"),
)
ADD_NORM = KernelText(
    name="add_norm",
    parts=("add_norm.inc",),
    inputs=(Buffer("x", "T"), Buffer("y", "T"), Buffer("weight", "T"), Buffer("epsilon", "float")),
    outputs=(Buffer("total", "T"), Buffer("normed", "T")),
    constants=("K", "SIMDS", "VEC"),
)


def packed(text: KernelText) -> KernelText:
    """``text`` for pools of ``BITS`` bits a number: codes, scales and biases stand where the keys and values stood, and
    ``P`` is what a number is read as."""
    held = {
        "k_pool": (Buffer("k_pool", "word"), Buffer("k_scales", "half"), Buffer("k_biases", "half")),
        "v_pool": (Buffer("v_pool", "word"), Buffer("v_scales", "half"), Buffer("v_biases", "half")),
    }
    return KernelText(
        name=f"{text.name}_packed",
        parts=tuple("pool_packed.inc" if part == _POOL else part for part in text.parts),
        inputs=tuple(buffer for given in text.inputs for buffer in held.get(given.name, (given,))),
        outputs=text.outputs,
        constants=(*text.constants, "BITS"),
    )


PACKED_TEXTS = tuple(
    packed(text) for text in (DECODE_WHOLE, DECODE_SPLIT, CHUNK_WRITE, CHUNK_GATHER, CHUNK_WHOLE, CHUNK_SPLIT)
)
ALL_TEXTS = (
    DECODE_WHOLE,
    DECODE_SPLIT,
    DECODE_REDUCE,
    CHUNK_WRITE,
    CHUNK_GATHER,
    BLOCK_COPY,
    CHUNK_WHOLE,
    CHUNK_SPLIT,
    CHUNK_REDUCE,
    SAMPLE,
    PROJECT,
    ROTATE,
    ADD_NORM,
    *PACKED_TEXTS,
)
