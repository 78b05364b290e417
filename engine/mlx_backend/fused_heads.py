"""Lets attention layers hand their joined query, key and value over as they are, for one kernel to split and rotate.

Owns: which attention layers do nothing else between their products and their cache (each is tried), and the frequencies
of their rotation. Must not know: steps, pools, how a layer attends.

Inside a step the rotation of such a layer gives back what it gets, and what the layer then passes to its cache is not
computed at all: the cache takes the joined product instead.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.positional_encoding import RoPE

from engine.mlx_backend.kernels import reference
from engine.mlx_backend.kernels.rotating import Heads, RotationKernel
from engine.mlx_backend.layer_trial import POSITIONS, Recorder, near, random_rows
from engine.mlx_backend.mlx_lm_parts import Model
from engine.mlx_backend.row_products import QUERY_KEY_VALUE, ProductGroup, RowProducts

QueriesKeysValues = tuple[mx.array, mx.array, mx.array]


class FusedHeads:
    """All layers of one model whose heads can be split and rotated by ``kernel``."""

    def __init__(self, products: RowProducts, kernel: RotationKernel) -> None:
        self._products, self._kernel = products, kernel
        self._layers: dict[ProductGroup, tuple[Heads, mx.array]] = {}

    @property
    def num_layers(self) -> int:
        """Attention layers that were found."""
        return len(self._layers)

    @property
    def waits(self) -> bool:
        """Whether the newest product is one that ``take`` will split: then nobody else rotates it."""
        newest = self._products.newest
        return newest is not None and newest[0] in self._layers

    def take(self, positions: mx.array) -> QueriesKeysValues | None:
        """Rotated queries, keys and values [T, heads, 1, dim] of the newest product; None if it is another's.

        ``positions`` int32 [T].
        """
        newest, self._products.newest = self._products.newest, None
        if newest is None or newest[0] not in self._layers:
            return None
        group, joined = newest
        heads, frequencies = self._layers[group]
        return self._kernel(joined, positions, frequencies, heads)

    def take_over(self, model: Model) -> None:
        """Find the layers. ``model``'s attention and products must be taken over already."""
        for module in model.modules():
            group, rope = _group_of(module), module.children().get("rope")
            found = None if group is None or rope is None else _heads_of(module, rope, group)
            if group is None or rope is None or found is None:
                continue
            self._layers[group] = found
            if not isinstance(rope, _WaitingRotation):
                base = type(rope)
                rope.__class__ = type(base.__name__, (_WaitingRotation, base), {})
            rope.fused_heads = self


class _WaitingRotation:
    """Mixed in front of a rotation's class."""

    fused_heads: FusedHeads

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if self.fused_heads.waits:
            return x
        rotated: mx.array = super().__call__(x, *args, **kwargs)  # type: ignore[misc]
        return rotated


def _group_of(module: Model) -> ProductGroup | None:
    """The group that the module's query, key and value share."""
    children = module.children()
    layers = [children[name] for name in QUERY_KEY_VALUE if name in children]
    group = getattr(layers[0], "product_group", None) if layers else None
    return group if isinstance(group, ProductGroup) and len(layers) == 3 and group.serves(layers) else None


def _heads_of(module: Model, rope: Model, group: ProductGroup) -> tuple[Heads, mx.array] | None:
    """The layer's heads and frequencies, if it does no more to its products before attention than split and rotate."""
    recorder, rows = Recorder(), random_rows(group.weight.shape[1], group.weight.dtype)
    try:
        module(rows, mask=None, cache=recorder)
    except Exception:  # another signature, another cache: not a layer that this is for
        return None
    if [array.ndim for array in recorder.handed] != [4, 4, 4]:
        return None
    (_, num_heads, _, dim), (_, num_kv_heads, _, _) = (array.shape for array in recorder.handed[:2])
    heads, frequencies = Heads(num_heads, num_kv_heads, dim), _frequencies_of(rope, dim)
    if frequencies is None or heads.width != group.weight.shape[0]:
        return None
    wanted = reference.rotate(group.joined(rows), mx.array(POSITIONS, mx.int32), frequencies, heads)
    same = all(near(array, other) for array, other in zip(recorder.handed, wanted, strict=True))
    return (heads, frequencies) if same else None


def _frequencies_of(rope: Model, dim: int) -> mx.array | None:
    """Radians per position of each pair of halves, fp32 [dim / 2]; None for a rotation of another kind."""
    if getattr(rope, "traditional", False) or getattr(rope, "dims", None) != dim or dim % 2:
        return None
    if isinstance(rope, RoPE):
        share = np.arange(dim // 2) / (dim // 2)
        frequencies = mx.array((rope.scale * rope.base**-share).astype(np.float32))
    elif isinstance(periods := getattr(rope, "_freqs", None), mx.array):
        frequencies = 1.0 / periods.astype(mx.float32)
    else:
        return None
    mx.eval(frequencies)
    return frequencies
