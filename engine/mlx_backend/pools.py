"""Makes the KV pools of a model's layers.

Owns: the choice between plain and quantised pools. Must not know: what is stored in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from engine.mlx_backend.paged_cache import LayerPool, LayerShape
from engine.mlx_backend.quantised_pool import QuantisedLayerPool


def make_pools(
    shapes: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: mx.Dtype, kv_bits: int | None = None
) -> list[LayerPool]:
    """Zeroed pools, evaluated: memory is taken now, not in the first request. ``kv_bits`` None: plain ``dtype``."""
    pools: list[LayerPool] = [
        LayerPool(shape, num_blocks, block_size, dtype)
        if kv_bits is None
        else QuantisedLayerPool(shape, num_blocks, block_size, dtype, kv_bits)
        for shape in shapes
    ]
    mx.eval([array for pool in pools for array in pool.arrays()])
    return pools
