"""Reads a GGUF file into the configuration and weight names of the mlx-lm model that computes it.

Owns: going through the file's tensors, and saying what their stored form changed. Must not know: block formats
(gguf_blocks), what an architecture's names and numbers mean (gguf_architectures), or the tokenizer in the same file
(engine/text reads it).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from gguf.constants import GGMLQuantizationType

from engine.errors import UnsupportedModelError
from engine.mlx_backend.gguf_architectures import ARCHITECTURES, FIX, ROPE_TENSORS, Architecture, Found, Metadata
from engine.mlx_backend.gguf_blocks import GROUP, LoadedTensor, load_tensor
from engine.text.gguf_metadata import GgufTensor, read_gguf_metadata, read_gguf_tensors

# Below this a stored form is the file's own but for the rounding of its scales to half precision.
_ROUNDING = 2**-8


@dataclass(frozen=True, slots=True)
class GgufCheckpoint:
    """``config`` and ``weights`` as mlx-lm names them. ``quantization``: group size and bits per packed module.

    ``notes``: sentences on tensors whose stored form differs from the file's.
    """

    config: dict[str, object]
    weights: dict[str, mx.array]
    quantization: dict[str, dict[str, int]]
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Conversions:
    """Tensors by what they were and what they became, with the largest change among them."""

    largest_error: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    count: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, tensor: GgufTensor, loaded: LoadedTensor) -> None:
        stored = "dense half precision" if loaded.bits is None else f"{loaded.bits}-bit groups of {GROUP}"
        key = (GGMLQuantizationType(tensor.type_number).name, stored)
        self.count[key] += 1
        self.largest_error[key] = max(self.largest_error[key], loaded.added_error)

    def sentences(self) -> tuple[str, ...]:
        return tuple(
            f"{self.count[key]} tensors of type {key[0]} are held in MLX's {key[1]}, which changes the weights by "
            f"up to {100 * error:.2f}% (root mean square)."
            for key, error in sorted(self.largest_error.items())
            if error > _ROUNDING
        )


def read_gguf(path: Path, dense_dtype: mx.Dtype | None) -> GgufCheckpoint:
    """Read ``path``.

    ``dense_dtype``: dequantise everything to this type; None keeps quantised weights packed, with scales in half
    precision, which then decide the type of the activations. Raises UnsupportedModelError for what cannot be computed
    right.
    """
    metadata, tensors = Metadata(read_gguf_metadata(path)), read_gguf_tensors(path)
    architecture = ARCHITECTURES.get(metadata.architecture)
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(
            f"GGUF architecture {metadata.architecture!r} is not known here (known: {known}).", FIX
        )
    config = architecture.config(metadata, _found(tensors))
    named = [(architecture.module_name(_stem(tensor)), tensor) for tensor in tensors if not _is_rope(tensor)]
    weights, quantization, conversions = {}, {}, _Conversions()
    half_dtype = architecture.half_dtype
    for module, tensor in named:
        loaded = load_tensor(tensor, dense_dtype, half_dtype)
        leaf = tensor.name.rpartition(".")[2]
        if loaded.bits is not None:
            quantization[module] = {"group_size": GROUP, "bits": loaded.bits}
        if dense_dtype is None:
            conversions.add(tensor, loaded)
        for name, array in _arranged(architecture, metadata, tensor, loaded.leaves).items():
            floats = array if array.dtype == mx.uint32 else array.astype(dense_dtype or half_dtype)
            weights[f"{module}.{leaf if name == 'weight' else name}"] = floats
            # At once: a tensor's pieces and its former order go before the next is read.
            mx.eval(floats)
    return GgufCheckpoint(config, weights, quantization, conversions.sentences())


def _arranged(
    architecture: Architecture, metadata: Metadata, tensor: GgufTensor, leaves: Mapping[str, mx.array]
) -> dict[str, mx.array]:
    return {name: architecture.arrange(_stem(tensor), array, metadata) for name, array in leaves.items()}


def _found(tensors: Iterable[GgufTensor]) -> Found:
    by_stem = {_stem(tensor): tensor for tensor in tensors}
    if "token_embd" not in by_stem:
        raise UnsupportedModelError("The GGUF file has no token embedding.", FIX)
    factors: dict[str, list[float]] = {}
    for stem in ROPE_TENSORS:
        if stem in by_stem:
            divisors: Any = load_tensor(by_stem[stem], mx.float32, mx.float32).leaves["weight"].tolist()
            factors[stem] = divisors
    return Found(by_stem["token_embd"].dimensions[-1], "output" in by_stem, factors)


def _is_rope(tensor: GgufTensor) -> bool:
    return _stem(tensor) in ROPE_TENSORS


def _stem(tensor: GgufTensor) -> str:
    return tensor.name.rpartition(".")[0]
