"""Random numbers that depend on a row's seed, its token index and the token id, and on nothing else.

Owns: the counter-based generator. Must not know: sampling parameters. The same request gets the same numbers alone, in
any batch, padded or not, after a preemption and on every device.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

_MASK = (1 << 64) - 1


def row_keys(seeds: Sequence[int], output_indices: Sequence[int]) -> mx.array:
    """One 64-bit key per row as uint32 ``[R, 2]``, from its seed and the index of the token to draw."""
    words = [key_words(seed, index) for seed, index in zip(seeds, output_indices, strict=True)]
    return mx.array(np.array(words, dtype=np.uint32))


def key_words(seed: int, output_index: int) -> tuple[int, int]:
    """The high and the low 32 bits of a row's key."""
    key = _mix64(_mix64(seed) + output_index)
    return key >> 32, key & 0xFFFFFFFF


def gumbel(keys: mx.array, vocab_size_tokens: int) -> mx.array:
    """Standard Gumbel noise fp32 ``[R, V]`` for ``keys`` ``[R, 2]``: argmax(log p + noise) is a draw from p."""
    tokens = mx.arange(vocab_size_tokens, dtype=mx.uint32)[None]
    bits = _mix32(_mix32(tokens ^ keys[:, :1]) + keys[:, 1:])
    # The exponential variate is -log1p(-u): u near 0 keeps its precision, and those are the tokens that win. u is kept
    # below 1 so that no token's noise is -inf: it might be the only one that is allowed.
    uniform = mx.minimum((bits.astype(mx.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -mx.log(-mx.log1p(-uniform))


def _mix64(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix32(bits: mx.array) -> mx.array:
    """A 32-bit bijective hash ("lowbias32", Wellons 2018)."""
    bits = (bits ^ (bits >> 16)) * mx.array(0x7FEB352D, mx.uint32)
    bits = (bits ^ (bits >> 15)) * mx.array(0x846CA68B, mx.uint32)
    return bits ^ (bits >> 16)
