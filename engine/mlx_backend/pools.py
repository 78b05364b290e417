"""Makes the KV pools of a model's layers.

Owns: the choice between plain and quantised pools. Must not know: what is stored in them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import mlx.core as mx

from engine.mlx_backend.input_batch import BlockKey
from engine.mlx_backend.paged_cache import LayerPool, LayerShape
from engine.mlx_backend.quantised_pool import QuantisedLayerPool


def make_pools(
    shapes: Sequence[LayerShape],
    num_blocks: int,
    block_size: int,
    dtype: mx.Dtype,
    kv_bits: int | None = None,
    num_window_blocks: int | None = None,
) -> list[LayerPool]:
    """Zeroed pools, evaluated: memory is taken now, not in the first request. ``kv_bits`` None: plain ``dtype``.

    ``num_window_blocks``: blocks of sliding-window layers; None: as many as the others have.
    """

    def make(shape: LayerShape) -> LayerPool:
        is_apart = shape.window is not None and num_window_blocks is not None
        size = num_window_blocks if is_apart and num_window_blocks is not None else num_blocks
        if kv_bits is None:
            return LayerPool(shape, size, block_size, dtype)
        return QuantisedLayerPool(shape, size, block_size, dtype, kv_bits)

    pools = [make(shape) for shape in shapes]
    mx.eval([array for pool in pools for array in pool.arrays()])
    return pools


def clear_blocks(pools: Iterable[LayerPool], keys: Collection[BlockKey], has_window_pools: bool) -> None:
    """Set whole blocks to zero, in every layer that has them."""
    of_window = sorted(key.block_id for key in keys if key.of_window)
    of_others = sorted(key.block_id for key in keys if not key.of_window)
    for pool in pools:
        blocks = of_window if has_window_pools and pool.shape.window is not None else of_others
        if blocks:
            pool.clear_blocks(blocks)
