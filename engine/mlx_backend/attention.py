"""Takes over attention in a loaded mlx-lm model, without changing mlx-lm.

Owns: finding where a model's attention looks up ``scaled_dot_product_attention``, and the dispatcher put there. Must
not know: how the paged attention is computed.

The name is replaced in the module that *defines* the running ``__call__`` (a model may inherit its attention from
another architecture's file). The dispatcher passes every other cache on to the original, so that mlx-lm's own
generation in the same process is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from engine.errors import UnsupportedModelError
from engine.mlx_backend.mlx_lm_parts import Model
from engine.mlx_backend.mlx_lm_parts import scaled_dot_product_attention as original
from engine.mlx_backend.paged_cache import PagedLayerCache

_NAME = "scaled_dot_product_attention"


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
    """Install the dispatcher wherever ``model`` looks attention up. Returns the number of places (0: none found)."""
    places = {id(names): names for module in model.modules() if _NAME in (names := _globals_of(module))}
    for names in places.values():
        if names[_NAME] is original:
            names[_NAME] = dispatch
    return sum(names[_NAME] is dispatch for names in places.values())


def _globals_of(module: Model) -> dict[str, object]:
    call: Callable[..., object] = type(module).__call__
    names: dict[str, object] = getattr(call, "__globals__", {})
    return names
