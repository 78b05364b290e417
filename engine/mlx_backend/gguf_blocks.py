"""Turns one tensor of a GGUF file into MLX arrays, dense or in MLX's affine quantisation.

Owns: ggml's block formats, the choice of an affine form for each, and what that form changes, measured. Must not know:
names of tensors and models.

Values come from the ``gguf`` package's dequantisers. Formats whose blocks are affine in groups of 32 keep their codes
and scales, so nothing but the scales' rounding to half precision changes. Formats with smaller groups or curved grids
have no equal in MLX: they are quantised anew, with the fewest bits whose added noise is small beside the noise that the
file's own quantisation left, or kept dense where 8 bits do not reach that. A tensor is read piece by piece, so loading
needs its result and some tens of MiB.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K, dequantize
from numpy.typing import NDArray

from engine.errors import UnsupportedModelError
from engine.text.gguf_metadata import GgufTensor

GROUP = 32
_Floats: TypeAlias = NDArray[np.float32]
_Bytes: TypeAlias = NDArray[np.uint8]

_PIECE_VALUES = 1 << 20
_MAX_THREADS = 8
_CANDIDATE_BITS = (4, 5, 6, 8)
# Rounding to 2^b levels over four standard deviations leaves a noise of 4 / (2^b - 1) / sqrt(12) of one. What comes on
# top may be two fifths of that: noises add as squares, so the sum grows by a twelfth at most.
_ADDED_SHARE = 0.4
_FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
_FIX = "use a model in mlx-lm's layout (a folder or a hub id) instead"


@dataclass(frozen=True, slots=True)
class LoadedTensor:
    """``leaves``: "weight" alone, or "weight", "scales" and "biases" in groups of 32 with ``bits`` each.

    ``added_error``: root mean square of what the stored form changed, over that of the values.
    """

    leaves: Mapping[str, mx.array]
    bits: int | None = None
    added_error: float = 0.0


@dataclass(frozen=True, slots=True)
class _Packed:
    """A piece in affine form, shape (rows, columns / 32) for ``scales`` and ``biases``."""

    words: mx.array
    scales: mx.array
    biases: mx.array


@dataclass(slots=True)
class _Error:
    """Sums of squares over the pieces of a tensor."""

    squared_difference: float = 0.0
    squared_value: float = 0.0

    def add(self, values: _Floats, piece: _Packed, bits: int) -> None:
        scales, biases = piece.scales.astype(mx.float32), piece.biases.astype(mx.float32)
        stored = mx.dequantize(piece.words, scales, biases, GROUP, bits)
        original = mx.array(values)
        sums: Any = mx.stack([mx.square(stored - original).sum(), mx.square(original).sum()]).tolist()
        self.squared_difference += sums[0]
        self.squared_value += sums[1]

    @property
    def relative(self) -> float:
        return math.sqrt(self.squared_difference / self.squared_value) if self.squared_value else 0.0


def load_tensor(tensor: GgufTensor, dense_dtype: mx.Dtype | None, half_dtype: mx.Dtype) -> LoadedTensor:
    """Read ``tensor``; the weight's shape is its dimensions, slowest first.

    ``dense_dtype``: dequantise to this type; None packs quantised matrices, with scales in ``half_dtype``, and turns
    all else into ``half_dtype``. Raises UnsupportedModelError for a format without a dequantiser.
    """
    reader = _Reader.open(tensor)
    if dense_dtype is not None or reader.kind in _FLOATS or reader.num_columns % GROUP:
        return LoadedTensor({"weight": _dense(reader, dense_dtype or half_dtype)})
    affine = _AFFINE.get(reader.kind)
    if affine is not None:
        return _pack(reader, half_dtype, affine.bits, affine.forms)
    bits = _fewest_bits(reader, half_dtype)
    return LoadedTensor({"weight": _dense(reader, half_dtype)}) if bits is None else _pack(reader, half_dtype, bits)


def _fewest_bits(reader: _Reader, half_dtype: mx.Dtype) -> int | None:
    """Tried on the first piece; None when eight bits are not enough."""
    piece = reader.piece(0)
    for bits in _CANDIDATE_BITS:
        error = _Error()
        error.add(piece.values, _quantise(piece, half_dtype, bits), bits)
        if error.relative <= _largest_added_error(reader.kind):
            return bits
    return None


def _largest_added_error(kind: GGMLQuantizationType) -> float:
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    levels: float = 2 ** max(2, block_bytes * 8 // block_values) - 1
    return _ADDED_SHARE * 4 / levels / math.sqrt(12)


def _dense(reader: _Reader, dtype: mx.Dtype) -> mx.array:
    result = mx.zeros((reader.num_rows, reader.num_columns), dtype)
    for piece in reader.pieces():
        # In place, because nothing else holds the array; evaluated at once, so that the piece can go.
        result[piece.start : piece.start + len(piece.values)] = mx.array(piece.values).astype(dtype)
        mx.eval(result)
    return result.reshape(reader.shape)


def _pack(
    reader: _Reader, half_dtype: mx.Dtype, bits: int, forms: Callable[[_Bytes], _Forms] | None = None
) -> LoadedTensor:
    num_groups = reader.num_columns // GROUP
    leaves = {
        "weight": mx.zeros((reader.num_rows, num_groups * bits), mx.uint32),
        "scales": mx.zeros((reader.num_rows, num_groups), half_dtype),
        "biases": mx.zeros((reader.num_rows, num_groups), half_dtype),
    }
    error = _Error()
    for piece in reader.pieces():
        packed = _quantise(piece, half_dtype, bits) if forms is None else _keep_codes(piece, half_dtype, bits, forms)
        error.add(piece.values, packed, bits)
        for name, part in zip(leaves, (packed.words, packed.scales, packed.biases), strict=True):
            leaves[name][piece.start : piece.start + len(piece.values)] = part
            mx.eval(leaves[name])
    matrices = {name: leaf.reshape(*reader.shape[:-1], leaf.shape[-1]) for name, leaf in leaves.items()}
    return LoadedTensor(matrices, bits, error.relative)


def _quantise(piece: _Piece, half_dtype: mx.Dtype, bits: int) -> _Packed:
    words, scales, biases = mx.quantize(mx.array(piece.values), GROUP, bits)
    return _Packed(words, scales.astype(half_dtype), biases.astype(half_dtype))


def _keep_codes(piece: _Piece, half_dtype: mx.Dtype, bits: int, forms: Callable[[_Bytes], _Forms]) -> _Packed:
    """The file's own codes, found again from the dequantised values and their groups' scale and smallest value."""
    scales, biases = (form.reshape(-1, 1) for form in forms(piece.blocks))
    steps = (piece.values.reshape(-1, GROUP) - biases) / np.where(scales == 0, np.float32(1), scales)
    codes = np.clip(np.rint(steps), 0, 2**bits - 1).astype(np.uint32)
    num_rows = len(piece.values)
    scale, bias = (mx.array(form.reshape(num_rows, -1)).astype(half_dtype) for form in (scales, biases))
    return _Packed(mx.array(_pack_codes(codes, bits).reshape(num_rows, -1)), scale, bias)


def _pack_codes(codes: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    """(groups, 32) -> (groups, bits): codes one after the other from the lowest bit of the first word, as MLX reads."""
    words = np.zeros((len(codes), bits), np.uint32)
    for index in range(GROUP):
        word, shift = divmod(index * bits, 32)
        words[:, word] |= codes[:, index] << np.uint32(shift)
        if shift + bits > 32:
            words[:, word + 1] |= codes[:, index] >> np.uint32(32 - shift)
    return words


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows ``start`` and following: ``values`` of shape (rows, columns), and their blocks' bytes."""

    start: int
    values: _Floats
    blocks: _Bytes


@dataclass(frozen=True, slots=True)
class _Reader:
    """One tensor's rows in the mapped file. ``rows``: (rows, bytes of a row)."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    rows: _Bytes = field(repr=False)

    @classmethod
    def open(cls, tensor: GgufTensor) -> _Reader:
        try:
            kind = GGMLQuantizationType(tensor.type_number)
            block_values, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise UnsupportedModelError(
                f"The GGUF tensor {tensor.name} is of type {tensor.type_number}, which is not known here.", _FIX
            ) from None
        shape = tuple(reversed(tensor.dimensions))
        if not shape or tensor.num_values == 0 or shape[-1] % block_values:
            raise UnsupportedModelError(f"The GGUF tensor {tensor.name} has the odd shape {shape}.", _FIX)
        num_bytes = tensor.num_values // block_values * block_bytes
        if tensor.offset + num_bytes > tensor.path.stat().st_size:
            raise UnsupportedModelError(
                f"{tensor.path.name} cannot be read: {tensor.name} lies past the end of the file.", "fetch it again"
            )
        mapped = np.memmap(tensor.path, np.uint8, "r", tensor.offset, (num_bytes,))
        reader = cls(tensor.name, kind, shape, mapped.reshape(math.prod(shape[:-1]), -1))
        reader.refuse_unreadable()
        return reader

    def refuse_unreadable(self) -> None:
        """Raise UnsupportedModelError when there is no dequantiser, before anything of the model is in memory."""
        block_bytes = GGML_QUANT_SIZES[self.kind][1]
        try:
            dequantize(np.zeros((1, block_bytes), np.uint8), self.kind)
        except RuntimeError:  # what the package raises for a format that it only knows by name
            raise UnsupportedModelError(
                f"The GGUF tensor {self.name} is stored as {self.kind.name}, which has no dequantiser here.",
                _FIX,
            ) from None

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_columns(self) -> int:
        return self.shape[-1]

    def pieces(self) -> Iterator[_Piece]:
        """All rows in order, a few pieces being dequantised ahead in other threads (NumPy lets go of the GIL)."""
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        ahead: deque[Future[_Piece]] = deque()
        with ThreadPoolExecutor(num_threads, "gguf") as threads:
            for start in range(0, self.num_rows, self._rows_of_a_piece):
                ahead.append(threads.submit(self.piece, start))
                if len(ahead) > num_threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    @property
    def _rows_of_a_piece(self) -> int:
        return max(1, _PIECE_VALUES // self.num_columns)

    def piece(self, start: int) -> _Piece:
        """The piece whose first row is ``start``."""
        data = np.ascontiguousarray(self.rows[start : start + self._rows_of_a_piece])
        with np.errstate(over="ignore", invalid="ignore"):
            values = dequantize(data, self.kind)
        if not np.isfinite(values).all():
            raise UnsupportedModelError(f"The GGUF tensor {self.name} holds values that are no numbers.", _FIX)
        block_bytes = GGML_QUANT_SIZES[self.kind][1]
        return _Piece(start, values.reshape(len(data), self.num_columns), data.reshape(-1, block_bytes))


_Forms: TypeAlias = tuple[_Floats, _Floats]


@dataclass(frozen=True, slots=True)
class _Affine:
    """``forms``: blocks (blocks, bytes) -> scale and smallest value of each group of 32, in order."""

    bits: int
    forms: Callable[[_Bytes], _Forms]


def _half(blocks: _Bytes, start: int) -> _Floats:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _centred(zero_code: int) -> Callable[[_Bytes], _Forms]:
    """A scale alone; ``zero_code`` stands for zero."""

    def forms(blocks: _Bytes) -> _Forms:
        scale = _half(blocks, 0)
        return scale, -np.float32(zero_code) * scale

    return forms


def _with_smallest(blocks: _Bytes) -> _Forms:
    return _half(blocks, 0), _half(blocks, 2)


def _of_superblocks(blocks: _Bytes) -> _Forms:
    """Eight groups share two half-precision factors: of their 6-bit scales, and of their 6-bit smallest values."""
    scales, smallest = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    return _half(blocks, 0) * scales.astype(np.float32), -_half(blocks, 2) * smallest.astype(np.float32)


_AFFINE: Mapping[GGMLQuantizationType, _Affine] = MappingProxyType(
    {
        GGMLQuantizationType.Q4_0: _Affine(4, _centred(8)),
        GGMLQuantizationType.Q4_1: _Affine(4, _with_smallest),
        GGMLQuantizationType.Q5_0: _Affine(5, _centred(16)),
        GGMLQuantizationType.Q5_1: _Affine(5, _with_smallest),
        GGMLQuantizationType.Q8_0: _Affine(8, _centred(128)),
        GGMLQuantizationType.Q4_K: _Affine(4, _of_superblocks),
        GGMLQuantizationType.Q5_K: _Affine(5, _of_superblocks),
    }
)
