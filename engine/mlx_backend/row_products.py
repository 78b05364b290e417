"""Lets a model's dense projections use the few-row kernels during a GPU step.

Owns: which layers are taken (dense 16-bit weights), which of them share one launch (query, key and value; gate and up),
and that this happens inside a step of ours only: mlx-lm's own generation in the same process stays as it is. Must not
know: steps, pools.

On MLX's CUDA backend the host needs some 20 us to queue one product of two to some hundred rows (an algorithm search,
a stream capture) and 3 us to queue a kernel: an 8B model's 225 products made a step of 32 rows wait for the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import mlx.core as mx
from mlx.nn.layers.linear import Linear

from engine.mlx_backend.kernels.projecting import ProjectionKernels, can_project
from engine.mlx_backend.mlx_lm_parts import Model

# Children of one module that mlx-lm's models call with the same input, in this order.
_SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Use(IntEnum):
    """Which products the kernels take at some number of rows."""

    NONE = 0
    SMALL = 1  # those that a GPU needs less time for than the host needs to queue MLX's
    ALL = 2


_SMALL_BYTES = 64 * 2**20


class RowProducts:
    """All projections of one model. ``active`` within a step; ``use``: what the kernels take, by number of rows."""

    def __init__(self, kernels: ProjectionKernels) -> None:
        self.kernels = kernels
        self.use: dict[int, Use] = {}
        self.active = False
        self.num_layers = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Use the kernels inside."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def take_over(self, model: Model) -> None:
        """Give every dense projection in ``model`` a group; layers that share an input share it."""
        for module in model.modules():
            children = {
                name: child for name, child in module.children().items() if isinstance(child, Linear) and _fits(child)
            }
            groups = [[children.pop(name) for name in names] for names in _SHARED_INPUT if set(names) <= set(children)]
            for layers in (*groups, *([child] for child in children.values())):
                _Group(self, layers)
                self.num_layers += len(layers)


def _fits(layer: Model) -> bool:
    return type(layer) in (Linear, _RowLinear) and can_project(layer.weight)


class _Group:
    """Layers that are given the same input one after the other: the first call computes for all."""

    def __init__(self, owner: RowProducts, layers: Sequence[Linear]) -> None:
        self._owner = owner
        self._layers = layers
        self._widths = mx.array([layer.weight.shape[0] for layer in layers], mx.int32)
        mx.eval(self._widths)
        num_bytes = sum(layer.weight.nbytes for layer in layers)
        self._least_use = Use.SMALL if num_bytes <= _SMALL_BYTES else Use.ALL
        self._input: mx.array | None = None
        self._results: dict[int, mx.array] = {}
        for index, layer in enumerate(layers):
            layer.__class__ = _RowLinear
            layer.row_group = self
            layer.row_index = index

    def product(self, x: mx.array, index: int) -> mx.array | None:
        """``x @ weight.T`` of one layer, or None where the kernels do not apply."""
        if not self._owner.active or x.ndim != 3 or x.shape[1] != 1:
            return None
        if self._owner.use.get(x.shape[0], Use.NONE) < self._least_use:
            return None
        if x.dtype != self._layers[index].weight.dtype:
            return None
        if x is not self._input or index not in self._results:
            weights = [layer.weight for layer in self._layers]
            results = self._owner.kernels(x, weights, self._widths)
            self._input, self._results = x, dict(enumerate(results))
        result = self._results.pop(index)
        if not self._results:
            self._input = None  # nothing of a step is held longer than the step
        return result


class _RowLinear(Linear):
    """A ``Linear`` that asks its group first."""

    row_group: _Group
    row_index: int

    def __call__(self, x: mx.array) -> mx.array:
        result = self.row_group.product(x, self.row_index)
        if result is None:
            return super().__call__(x)
        return result + self.bias if "bias" in self else result
