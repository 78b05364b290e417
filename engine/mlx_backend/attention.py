"""Takes over attention in a loaded mlx-lm model, without changing mlx-lm.

Owns: the dispatcher that stands in for ``scaled_dot_product_attention``. Must not know: how the paged attention is
computed. Every cache that is not ours goes on to the original, so that mlx-lm's own generation in the same process is
unchanged.
"""

from __future__ import annotations

import mlx.core as mx

from engine.errors import UnsupportedModelError
from engine.mlx_backend.mlx_lm_parts import Model
from engine.mlx_backend.mlx_lm_parts import scaled_dot_product_attention as original
from engine.mlx_backend.paged_cache import PagedLayerCache
from engine.mlx_backend.replaced_names import replace_name


def dispatch(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: object,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Stands in for mlx-lm's function of the same name and arguments."""
    if not isinstance(cache, PagedLayerCache):
        return original(queries, keys, values, cache, scale, mask, sinks)
    if mask is not None:
        raise UnsupportedModelError(
            "The model passes position scores through the attention mask.", "choose a model with plain attention"
        )
    return cache.attend(queries, scale, sinks)


def take_over(model: Model) -> int:
    """Install the dispatcher wherever ``model`` looks attention up. Returns the number of files (0: none found)."""
    return replace_name(model, "scaled_dot_product_attention", original, dispatch)
