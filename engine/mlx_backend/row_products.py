"""Dense projections during a GPU step: one product for layers that share an input, by the projection kernel if rows are
few.

Owns: which layers are taken (dense 16-bit weights), which of them are joined (query, key and value; gate and up), and
that this happens inside a step of ours only: mlx-lm's own generation in the same process stays as it is. Must not know:
steps, pools.

On MLX's CUDA backend the host needs some 20 us to queue one product of two to some hundred rows (an algorithm search,
a stream capture) and 3 us to queue a kernel: an 8B model's 225 products made a step of 32 rows wait for the host.
Joined they are 129.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import accumulate

import mlx.core as mx
from mlx.nn.layers.linear import Linear

from engine.mlx_backend.kernels.projecting import MAX_ROWS, ProjectionKernel, can_project
from engine.mlx_backend.mlx_lm_parts import Model

# Children of one module that mlx-lm's models call with the same input, in this order.
QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
_SHARED_INPUT = (QUERY_KEY_VALUE, ("gate_proj", "up_proj"))


class Use(IntEnum):
    """How a step's products are computed."""

    APART = 0  # as the model has them
    JOINED = 1  # one product for layers with the same input
    SMALL = 2  # joined; those by the kernel that a GPU needs less time for than the host needs to queue MLX's
    ALL = 3  # joined, all by the kernel


_SMALL_BYTES = 64 * 2**20


class RowProducts:
    """All projections of one model. Inside ``step`` they follow its use; outside they are the model's own.

    ``uses``: what is best at so many decode rows, ``chunk_use``: with prompt chunks; whoever measures sets them.
    ``kernel`` None: the kernel is off. ``newest``: the group that computed last, with its joined result.
    """

    def __init__(self, kernel: ProjectionKernel | None) -> None:
        self.kernel = kernel
        self.uses: dict[int, Use] = {}
        self.chunk_use = Use.JOINED
        self.use: Use = Use.APART
        self.newest: tuple[ProductGroup, mx.array] | None = None

    def choices(self, num_rows: int) -> tuple[Use, ...]:
        """What can be tried at so many rows."""
        return tuple(Use) if self.kernel is not None and num_rows <= MAX_ROWS else (Use.APART, Use.JOINED)

    def use_for(self, num_decode_rows: int, num_chunk_rows: int) -> Use:
        """What a step of this size takes."""
        return self.chunk_use if num_chunk_rows else self.uses.get(num_decode_rows, Use.JOINED)

    @contextmanager
    def step(self, use: Use) -> Iterator[None]:
        """Compute products by ``use`` inside."""
        self.use = use
        try:
            yield
        finally:
            self.use, self.newest = Use.APART, None  # nothing of a step is held longer than the step

    def take_over(self, model: Model) -> None:
        """Give every dense projection in ``model`` a group; layers that share an input share it."""
        for module in model.modules():
            children = {
                name: child for name, child in module.children().items() if isinstance(child, Linear) and _fits(child)
            }
            groups = [[children.pop(name) for name in names] for names in _SHARED_INPUT if _joinable(children, names)]
            for layers in (*groups, *([child] for child in children.values())):
                ProductGroup(self, layers)


def _fits(layer: Model) -> bool:
    return type(layer) in (Linear, _GroupedLinear) and can_project(layer.weight)


def _joinable(children: dict[str, Linear], names: Sequence[str]) -> bool:
    """Whether the layers are there and alike: weights of one type and depth, biases with all or none."""
    layers = [children[name] for name in names if name in children]
    alike = {(layer.weight.dtype, layer.weight.shape[1], "bias" in layer) for layer in layers}
    return len(layers) == len(names) and len(alike) == 1


class ProductGroup:
    """Layers that are given the same input one after the other: the first call computes for all."""

    def __init__(self, owner: RowProducts, layers: Sequence[Linear]) -> None:
        self._owner = owner
        self._layers = layers
        self.weight = _joined_weight(layers)
        self._transposed = self.weight.T
        self._bias = mx.concatenate([layer.bias for layer in layers]) if "bias" in layers[0] else None
        mx.eval(self._transposed, [] if self._bias is None else self._bias)
        self._borders = list(accumulate(layer.weight.shape[0] for layer in layers))[:-1]
        self._least_use = Use.SMALL if self.weight.nbytes <= _SMALL_BYTES else Use.ALL
        self._input: mx.array | None = None
        self._results: dict[int, mx.array] = {}
        for index, layer in enumerate(layers):
            layer.__class__ = _GroupedLinear
            layer.product_group = self
            layer.index_in_group = index

    def serves(self, layers: Sequence[Linear]) -> bool:
        """Whether the group is made of these layers."""
        return list(map(id, self._layers)) == list(map(id, layers))

    def __call__(self, x: mx.array, index: int) -> mx.array | None:
        """The result of one layer, or None where its own product is to be taken."""
        if self._owner.use is Use.APART or x.ndim != 3 or x.shape[1] != 1 or x.dtype != self.weight.dtype:
            return None
        if x is not self._input or index not in self._results:
            joined = self.joined(x)
            self._owner.newest = self, joined
            results = mx.split(joined, self._borders, axis=-1) if self._borders else [joined]
            self._input, self._results = x, dict(enumerate(results))
        result = self._results.pop(index)
        if not self._results:
            self._input = None
        return result

    def joined(self, x: mx.array) -> mx.array:
        """All results side by side, ``x`` [M, 1, K] -> [M, 1, N]."""
        kernel = self._owner.kernel
        if kernel is not None and self._owner.use >= self._least_use and x.shape[0] <= MAX_ROWS:
            result = kernel(x, self.weight)
            return result if self._bias is None else result + self._bias
        if self._bias is None:
            return x @ self._transposed
        return mx.addmm(self._bias, x, self._transposed)


def _joined_weight(layers: Sequence[Linear]) -> mx.array:
    """The layers' weights below each other. They become views of it, so that nothing is kept twice."""
    if len(layers) == 1:
        weight: mx.array = layers[0].weight
        return weight
    if isinstance(layers[0], _GroupedLinear) and layers[0].product_group.serves(layers):
        return layers[0].product_group.weight
    joined = mx.concatenate([layer.weight for layer in layers])
    mx.eval(joined)
    first = 0
    for layer in layers:
        last = first + layer.weight.shape[0]
        layer.weight = joined[first:last]
        mx.eval(layer.weight)
        first = last
    mx.clear_cache()  # the weights of their own go back before the next ones are joined
    return joined


class _GroupedLinear(Linear):
    """A ``Linear`` that asks its group first."""

    product_group: ProductGroup
    index_in_group: int

    def __call__(self, x: mx.array) -> mx.array:
        result = self.product_group(x, self.index_in_group)
        return super().__call__(x) if result is None else result
