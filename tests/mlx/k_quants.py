"""Quantisers for ggml's K formats, which the ``gguf`` package can only read: plain rounding, no search for scales.

Each takes float32 of shape (blocks, 256) and gives the blocks' bytes, laid out as the package's dequantisers expect.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def quantise(values: Floats, kind: Kind) -> Bytes:
    """Quantise a matrix whose rows are multiples of 256 long; returns (rows, bytes of a row)."""
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, 256)
    return QUANTISERS[kind](blocks).reshape(len(values), -1)


def _half(values: Floats) -> Bytes:
    return values.reshape(-1, 1).astype(np.float16).view(np.uint8)


def _factor(values: Floats, levels: int) -> tuple[Floats, NDArray[np.uint8]]:
    """A half-precision factor per block and small integers per group, whose products are near ``values``."""
    factor = (values.max(axis=1, keepdims=True) / levels).astype(np.float16).astype(np.float32)
    codes = np.rint(values / np.where(factor == 0, 1, factor)).clip(0, levels)
    return factor, codes.astype(np.uint8)


def _with_smallest(blocks: Floats, group: int, code_levels: int, scale_levels: int) -> tuple[NDArray[np.uint8], ...]:
    """Codes (blocks, groups, group), scale and smallest codes (blocks, groups), and the two factors."""
    groups = blocks.reshape(len(blocks), -1, group)
    low = np.minimum(groups.min(axis=2), 0)
    d, scales = _factor((groups.max(axis=2) - low) / code_levels, scale_levels)
    dmin, smallest = _factor(-low, scale_levels)
    step, offset = (d * scales)[..., None], (dmin * smallest)[..., None]
    codes = np.rint((groups + offset) / np.where(step == 0, 1, step)).clip(0, code_levels).astype(np.uint8)
    return codes, scales, smallest, d, dmin


def _pack_scales(scales: Bytes, smallest: Bytes) -> Bytes:
    first = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    second = smallest[:, :4] | (smallest[:, 4:] >> 4 << 6)
    return np.concatenate([first, second, (scales[:, 4:] & 15) | (smallest[:, 4:] << 4)], axis=1)


def _nibbles(codes: Bytes) -> Bytes:
    """(blocks, 8, 32): neighbouring groups share bytes."""
    return ((codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)).reshape(len(codes), 128)


def _pairs(codes: Bytes) -> Bytes:
    """(blocks, 256) codes of two bits: four runs of 32 share 32 bytes."""
    runs = codes.reshape(len(codes), 2, 4, 32) & 3
    return (runs[:, :, 0] | runs[:, :, 1] << 2 | runs[:, :, 2] << 4 | runs[:, :, 3] << 6).reshape(len(codes), 64)


def _q4_k(blocks: Floats) -> Bytes:
    codes, scales, smallest, d, dmin = _with_smallest(blocks, 32, 15, 63)
    return np.concatenate([_half(d), _half(dmin), _pack_scales(scales, smallest), _nibbles(codes)], axis=1)


def _q5_k(blocks: Floats) -> Bytes:
    codes, scales, smallest, d, dmin = _with_smallest(blocks, 32, 31, 63)
    high = np.bitwise_or.reduce((codes >> 4) << np.arange(8, dtype=np.uint8)[None, :, None], axis=1)
    return np.concatenate([_half(d), _half(dmin), _pack_scales(scales, smallest), high, _nibbles(codes)], axis=1)


def _q2_k(blocks: Floats) -> Bytes:
    codes, scales, smallest, d, dmin = _with_smallest(blocks, 16, 3, 15)
    return np.concatenate([scales | smallest << 4, _pairs(codes.reshape(-1, 256)), _half(d), _half(dmin)], axis=1)


def _symmetric(blocks: Floats, code_levels: int, scale_levels: int) -> tuple[NDArray[np.int8], Bytes, Floats]:
    """Codes around zero in groups of 16, positive scales, one factor."""
    groups = blocks.reshape(len(blocks), 16, 16)
    d, scales = _factor(np.abs(groups).max(axis=2) / code_levels, scale_levels)
    step = (d * scales)[..., None]
    codes = np.rint(groups / np.where(step == 0, 1, step)).clip(-code_levels - 1, code_levels)
    return codes.astype(np.int8).reshape(-1, 256), scales, d


def _q3_k(blocks: Floats) -> Bytes:
    codes, scales, d = _symmetric(blocks, 3, 31)
    stored = (scales + 32).astype(np.uint8)
    low = (stored[:, :8] & 15) | (stored[:, 8:] & 15) << 4
    tops = (stored >> 4).reshape(-1, 4, 4)
    high = tops[:, 0] | tops[:, 1] << 2 | tops[:, 2] << 4 | tops[:, 3] << 6
    positive = (codes >= 0).astype(np.uint8).reshape(-1, 8, 32)
    mask = np.bitwise_or.reduce(positive << np.arange(8, dtype=np.uint8)[None, :, None], axis=1)
    return np.concatenate([mask, _pairs((codes & 3).astype(np.uint8)), low, high, _half(d)], axis=1)


def _q6_k(blocks: Floats) -> Bytes:
    codes, scales, d = _symmetric(blocks, 31, 127)
    stored = (codes.astype(np.int16) + 32).astype(np.uint8).reshape(-1, 2, 2, 64)
    low = ((stored[:, :, 0] & 15) | (stored[:, :, 1] & 15) << 4).reshape(-1, 128)
    return np.concatenate([low, _pairs((stored >> 4).reshape(-1, 256)), scales, _half(d)], axis=1)


QUANTISERS: dict[Kind, Callable[[Floats], Bytes]] = {
    Kind.Q2_K: _q2_k,
    Kind.Q3_K: _q3_k,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
}
