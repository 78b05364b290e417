"""SwiGLU without MLX's slow exponential, in packed steps on the CPU.

Owns: the function, where it stands in, and when: inside a step of ours only. Must not know: steps, pools.

Measured on one core, fp32: 16 ns a number through exp, 6 through a power of 2, which is a tenth of a prefill.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from engine.mlx_backend.mlx_lm_parts import Model
from engine.mlx_backend.mlx_lm_parts import swiglu as original
from engine.mlx_backend.replaced_names import replace_name

_LOG2E = math.log2(math.e)


class _Step:
    """Whether a packed step is being built now. MLX work of a process is done by one thread."""

    active = False


def take_over(model: Model) -> int:
    """Let ``model`` use the faster function in packed steps. Returns the number of files that now hold it."""
    return replace_name(model, "swiglu", original, _dispatch)


@contextmanager
def in_step() -> Iterator[None]:
    """A packed step is built inside."""
    _Step.active = True
    try:
        yield
    finally:
        _Step.active = False


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """``gate * sigmoid(gate) * x``."""
    return _fused(gate, x)


def _compute(gate: mx.array, x: mx.array) -> mx.array:
    return gate / (1.0 + mx.power(2.0, gate * -_LOG2E)) * x


_fused = mx.compile(_compute, shapeless=True)


def _dispatch(gate: mx.array, x: mx.array) -> mx.array:
    return swiglu(gate, x) if _Step.active else original(gate, x)
