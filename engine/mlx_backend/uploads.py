"""One host-to-device copy per step: many small integer arrays as one.

Owns: packing named int32 arrays into one, and taking them out again on the device as views. A layout is hashable and
says everything about the shapes of a step, so it is the key under which a compiled step is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Layout:
    """Names and shapes in the order in which they lie in the upload."""

    entries: tuple[tuple[str, tuple[int, ...]], ...]

    def unpack(self, upload: mx.array) -> dict[str, mx.array]:
        """Contiguous views of ``upload`` int32 ``[n]``."""
        views, first = {}, 0
        for name, shape in self.entries:
            last = first + math.prod(shape)
            views[name] = upload[first:last].reshape(shape)
            first = last
        return views


def pack(arrays: Mapping[str, npt.NDArray[np.generic]]) -> tuple[Layout, mx.array]:
    """``arrays`` of int32, or of float32 kept bit by bit (take them out with ``.view(mx.float32)``)."""
    parts = [np.ascontiguousarray(array) for array in arrays.values()]
    assert all(part.dtype in (np.int32, np.float32) for part in parts), {n: a.dtype for n, a in arrays.items()}
    layout = Layout(tuple((name, part.shape) for name, part in zip(arrays, parts, strict=True)))
    return layout, mx.array(np.concatenate([part.reshape(-1).view(np.int32) for part in parts]))
