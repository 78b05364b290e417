"""What a model's layers keep between tokens, read off the caches that mlx-lm itself makes for the model.

Owns: telling keys and values apart from recurrent state, their shapes, and building our caches in the same structure.
Must not know: pools, steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from engine.mlx_backend.mlx_lm_parts import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    Model,
    RotatingKVCache,
    make_prompt_cache,
)
from engine.mlx_backend.paged_cache import LayerShape

Cell = tuple[tuple[int, ...], mx.Dtype]
"""Shape of one sequence's array, without the batch axis, and its dtype."""

# A token alone, a chunk, a token alone again: state that grows with the length shows.
_TRIAL_TOKENS = (1, 6, 1)


@dataclass(frozen=True, slots=True)
class StateShape:
    """Recurrent state of one layer: its arrays in the model's own order; None is one that the model never sets."""

    cells: tuple[Cell | None, ...]

    @property
    def num_bytes(self) -> int:
        """State of one sequence."""
        return sum(dtype.size * _product(shape) for shape, dtype in filter(None, self.cells))


Part = LayerShape | StateShape
Entry = Part | tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """One entry per cache in the model's list; an entry of several parts is a tuple."""

    entries: tuple[Entry, ...]

    @property
    def attention(self) -> tuple[LayerShape, ...]:
        """All layers' keys and values, in order."""
        return tuple(part for part in self._parts() if isinstance(part, LayerShape))

    @property
    def states(self) -> tuple[StateShape, ...]:
        """All layers' recurrent states, in order."""
        return tuple(part for part in self._parts() if isinstance(part, StateShape))

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence, all layers."""
        return sum(state.num_bytes for state in self.states)

    def build(self, attention: Sequence[Any], states: Sequence[Any]) -> list[Any]:
        """The given caches, one per part in order, in the structure that the model expects."""
        keys_and_values, recurrent = iter(attention), iter(states)

        def place(part: Part) -> Any:
            return next(keys_and_values) if isinstance(part, LayerShape) else next(recurrent)

        return [
            CacheList(*(place(part) for part in entry))  # type: ignore[no-untyped-call]
            if isinstance(entry, tuple)
            else place(entry)
            for entry in self.entries
        ]

    def _parts(self) -> list[Part]:
        return [part for entry in self.entries for part in (entry if isinstance(entry, tuple) else (entry,))]


@dataclass(frozen=True, slots=True)
class Inspection:
    """``layout`` None: the model keeps something that cannot be pooled, and ``reason`` says what."""

    layout: CacheLayout | None
    reason: str
    compute_dtype: mx.Dtype
    vocab_size: int


def inspect_caches(model: Model) -> Inspection:
    """Run a few tokens through ``model`` with mlx-lm's caches, and look at what those hold afterwards."""
    caches = make_prompt_cache(model)
    seen: list[list[tuple[Cell | None, ...]]] = []
    logits = None
    for num_tokens in _TRIAL_TOKENS:
        logits = model(mx.zeros((1, num_tokens), mx.int32), cache=caches)
        mx.eval(logits)
        seen.append([_cells(part) for part in _flat(caches) if isinstance(part, ArraysCache)])
    assert logits is not None
    vocab_size = logits.shape[-1]
    dtype = next((part.keys.dtype for part in _flat(caches) if getattr(part, "keys", None) is not None), logits.dtype)
    if reason := _obstacle(caches, seen):
        return Inspection(None, reason, dtype, vocab_size)
    entries = tuple(
        tuple(_part(part) for part in cache.caches) if isinstance(cache, CacheList) else _part(cache)
        for cache in caches
    )
    return Inspection(CacheLayout(entries), "", dtype, vocab_size)


def _obstacle(caches: Sequence[Any], seen: Sequence[Sequence[tuple[Cell | None, ...]]]) -> str:
    """Why these caches cannot be pooled, or an empty string."""
    for index, cache in enumerate(caches):
        for part in _flat([cache]):
            name = type(part).__name__
            known = type(part) in (KVCache, ChunkedKVCache, ConcatenateKVCache, ArraysCache)
            if not known and not (type(part) is RotatingKVCache and part.keep == 0):
                return f"layer {index} keeps its past in a {name}"
            if type(part) is not ArraysCache and part.keys is None:
                return f"layer {index} does not use its {name}"
    if any(other != seen[0] for other in seen[1:]):
        return "the recurrent state changes its shape with the length"
    return ""


def _part(cache: Any) -> Part:
    if isinstance(cache, ArraysCache):
        return StateShape(_cells(cache))
    window = cache.max_size if isinstance(cache, RotatingKVCache) else getattr(cache, "chunk_size", None)
    _, num_kv_heads, _, k_head_dim = cache.keys.shape
    return LayerShape(num_kv_heads, k_head_dim, cache.values.shape[-1], window)


def _cells(cache: Any) -> tuple[Cell | None, ...]:
    return tuple(None if array is None else (tuple(array.shape[1:]), array.dtype) for array in cache.cache)


def _flat(caches: Sequence[Any]) -> list[Any]:
    return [part for cache in caches for part in (cache.caches if isinstance(cache, CacheList) else (cache,))]


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
