"""What a model's attention layers see as their caches where a pass is not packed: decode rows ``[B, 1]``, or one
sequence's chunk ``[1, L]``.

Owns: the two ways to attend there. ``SequenceLayerCache`` attends over the pool by itself, for models that call the
shared attention function. ``GatheredLayerCache`` hands out keys, values and masks as mlx-lm's own caches do, for models
that compute attention in their own way (soft-caps, position scores in the mask, sparse attention). Must not know: how
passes are made, recurrent state.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from engine.mlx_backend.input_batch import AttentionPlan, ChunkPart, DecodePart, Run, StepInputs
from engine.mlx_backend.paged_cache import LayerPool, PagedLayerCache, StepHolder


@dataclass(frozen=True, slots=True)
class PassInputs(StepInputs):
    """One pass. ``start``: position of a sequence's first token in this pass, None for decode rows."""

    start: int | None = None


class SequenceLayerCache(PagedLayerCache):
    """Attends over the pool, like the packed steps' cache, in passes of either shape."""

    @property
    def offset(self) -> mx.array | int:  # type: ignore[override]
        """Position of every decode row ``[B]``, or of the chunk's first token."""
        return _offset(self._inputs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the pass's keys and values, and hand them back unchanged: attention reads the pool."""
        super().update_and_fetch(_as_rows(keys), _as_rows(values))
        self._latest = keys, values
        return keys, values

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attention of ``queries`` ``[B, heads, L, head_dim]`` in the same shape."""
        out = super().attend(_as_rows(queries), scale, sinks)
        return out.transpose(2, 1, 0, 3) if queries.shape[2] > 1 else out


class GatheredLayerCache:
    """Keys, values and masks as mlx-lm's own caches give them.

    ``masks_by_group``: the model's scores have an axis for the query heads of each KV head, ``[B, kv_heads, n, L, S]``,
    and so have decode rows' masks.
    """

    def __init__(self, pool: LayerPool, holder: StepHolder, *, masks_by_group: bool = False) -> None:
        self.pool = pool
        self._holder = holder
        self._masks_by_group = masks_by_group
        self._fetched: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> mx.array | int:
        """Position of every decode row ``[B]``, or of the chunk's first token."""
        return _offset(self._inputs)

    @property
    def start_position(self) -> int:
        """Position of the first key that ``update_and_fetch`` hands out (chunked attention makes its own mask)."""
        inputs, (part,) = self._inputs, self._plan.chunks
        assert isinstance(inputs, PassInputs)
        assert inputs.start is not None
        return inputs.start + part.count - part.num_keys

    def maybe_trim_front(self) -> None:
        """Nothing to do: what is behind is not read."""

    @property
    def keys(self) -> mx.array:
        """The pool's keys. Models only tie it into the graph, by assigning what they make of it."""
        return self.pool.keys

    @keys.setter
    def keys(self, value: mx.array) -> None:
        """Ignored: every write to the pool is evaluated with the step."""

    @property
    def values(self) -> mx.array:
        """The pool's values, like ``keys``."""
        return self.pool.values

    @values.setter
    def values(self, value: mx.array) -> None:
        """Ignored, like ``keys``."""

    def make_mask(
        self, num_tokens: int = 1, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """What each query sees of the keys: bool ``[B, 1, 1, S]`` for decode rows, ``[L, S]`` for a chunk, "causal"
        where that says it all and no array is wanted, None for everything."""
        window = min(filter(None, (window_size, self.pool.shape.window)), default=None)
        if self._plan.chunks:
            return _chunk_mask(self._plan.chunks[0], return_array, window)
        mask = _rows_mask(self._plan.decodes[0], window, self.pool.shape.window)
        return mask[:, None] if self._masks_by_group and mask is not None else mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the pass's keys and values; all that its queries may see, ``[B, kv_heads, S, head_dim]``."""
        self.pool.write(_as_rows(keys), _as_rows(values), self._plan.write_index)
        if self._plan.chunks:
            part = self._plan.chunks[0]
            all_keys, all_values = (array[:, :, : part.num_keys] for array in self.pool.read(part.source))
        else:
            all_keys, all_values = self.pool.read(self._plan.decodes[0].source)
        self._fetched = all_keys.astype(keys.dtype), all_values.astype(values.dtype)
        return self._fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """For a layer that shares another's keys and values: what ``update_and_fetch`` gave it."""
        assert self._fetched is not None, "a layer shares keys and values that are not there yet"
        return self._fetched

    def forget(self) -> None:
        """The pass's graph is built: only it holds the pass's arrays from now on, so that they go as it is computed."""
        self._fetched = None

    @property
    def _inputs(self) -> StepInputs:
        assert self._holder.inputs is not None, "a layer's cache is used outside a step"
        return self._holder.inputs

    @property
    def _plan(self) -> AttentionPlan:
        return self._inputs.plans[self.pool.shape.kind]


def _offset(inputs: StepInputs) -> mx.array | int:
    assert isinstance(inputs, PassInputs)
    return inputs.positions if inputs.start is None else inputs.start


def _as_rows(array: mx.array) -> mx.array:
    """``[B, heads, 1, dim]`` as it is, a chunk's ``[1, heads, L, dim]`` as ``[L, heads, 1, dim]``."""
    return array.transpose(2, 1, 0, 3) if array.shape[2] > 1 else array


def _rows_mask(part: DecodePart, window: int | None, window_read: int | None) -> mx.array | None:
    if window == window_read:
        return part.valid
    assert window is not None
    if isinstance(part.source, Run):
        num_keys = part.source.count
        return None if num_keys <= window else mx.arange(num_keys)[None, None, None] >= num_keys - window
    assert part.valid is not None
    return part.valid & (mx.cumsum(part.valid.astype(mx.int32), axis=-1, reverse=True) <= window)


def _chunk_mask(part: ChunkPart, return_array: bool, window: int | None) -> mx.array | str | None:
    num_queries, num_keys = part.count, part.num_keys
    sees_all = window is None or num_keys <= window
    if sees_all and (num_queries == 1 or not return_array):
        return None if num_queries == 1 else "causal"
    query = mx.arange(num_keys - num_queries, num_keys)[:, None]
    key = mx.arange(num_keys)[None]
    causal = key <= query
    return causal if window is None else causal & (key > query - window)
