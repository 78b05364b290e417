"""Runs an mlx-lm model on packed steps: tokens ``[T, 1]`` in, logits of the sampling rows out.

Owns: pools and caches of one model, the language-model head on sampling rows only. Must not know: scheduling, sampling.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import numpy as np

from engine.batch import BatchRow, BlockCopy, StepBatch
from engine.mlx_backend import attention, cpu_activations
from engine.mlx_backend.input_batch import BlockKey, InputBuilder, StepInputs
from engine.mlx_backend.mlx_lm_parts import Model
from engine.mlx_backend.paged_cache import LayerPool, LayerShape, PagedLayerCache, StepHolder
from engine.mlx_backend.pools import clear_blocks, make_pools

_DECODER_NAMES = ("model", "transformer", "backbone")


class RowSelector:
    """Says which rows of the decoder's output go on to the head; ``used`` tells that the decoder obeyed, and
    ``selected`` is what it gave."""

    __slots__ = ("rows", "selected", "used")

    def __init__(self) -> None:
        self.rows: mx.array | None = None
        self.used = False
        self.selected: mx.array | None = None

    def chosen(self, logits: mx.array, rows: mx.array) -> mx.array:
        """Logits ``[R, vocab]`` of ``rows`` from what the model returned."""
        by_row = logits.reshape(-1, logits.shape[-1])
        # A decoder that was not found, or returns something else than hidden states: the head has run on all rows.
        return by_row if self.used else by_row[rows]


class _SelectsRows:
    """Mixed in front of a decoder's class: drops the rows that do not sample, so that the model's own head (tied,
    scaled, soft-capped: whatever it does) runs on the others alone."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = super().__call__(*args, **kwargs)  # type: ignore[misc]
        selector: RowSelector = self.row_selector  # type: ignore[attr-defined]
        if selector.rows is None or not isinstance(hidden, mx.array):
            return hidden
        selector.used = True
        selector.selected = hidden.reshape(-1, 1, hidden.shape[-1])[selector.rows]
        return selector.selected


class PackedModel:
    """One model over its own pools. Use from one thread."""

    def __init__(
        self,
        model: Model,
        shapes: tuple[LayerShape, ...],
        *,
        num_blocks: int,
        block_size: int,
        dtype: mx.Dtype,
        max_model_len: int,
        kv_bits: int | None = None,
        num_window_blocks: int | None = None,
    ) -> None:
        attention.take_over(model)
        cpu_activations.take_over(model)
        self._model = model
        self._selector = select_rows_in(model)
        self._holder = StepHolder()
        self.pools: list[LayerPool] = make_pools(shapes, num_blocks, block_size, dtype, kv_bits, num_window_blocks)
        self.caches = [PagedLayerCache(pool, self._holder, max_model_len) for pool in self.pools]
        self._has_window_pools = num_window_blocks is not None
        self.inputs = InputBuilder((shape.kind for shape in shapes), num_blocks, block_size, num_window_blocks)

    def build(self, batch: StepBatch, last_tokens: mx.array | None = None) -> StepInputs:
        """The step's inputs; ``last_tokens`` int32 ``[slots]`` for rows whose token is in flight."""
        return self.inputs.build(batch, last_tokens)

    def blocks_begun(self, row: BatchRow) -> list[BlockKey]:
        """Blocks whose first position ``row`` writes in this step."""
        return self.inputs.blocks_begun(row)

    def forward(self, step: StepInputs) -> mx.array:
        """Logits ``[R, vocab]`` of the sampling rows, lazily; the pools hold the step's keys and values afterwards."""
        logits, _ = self.forward_both(step)
        return logits

    def forward_both(self, step: StepInputs) -> tuple[mx.array, mx.array | None]:
        """The same, and the hidden states ``[R, width]`` that they were made of; None where no decoder was found."""
        self._holder.inputs = step
        self._selector.rows, self._selector.used = step.head_rows, False
        on_cpu = mx.default_device().type == mx.cpu
        try:
            with cpu_activations.in_step() if on_cpu else nullcontext():
                logits: mx.array = self._model(step.tokens, cache=self.caches)
            hidden = self._selector.selected
        finally:
            self._holder.inputs = self._selector.rows = self._selector.selected = None
            for cache in self.caches:
                cache.forget()
        return self._selector.chosen(logits, step.head_rows), None if hidden is None else hidden[:, -1]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks of every layer."""
        sources, targets = np.array([(copy.source, copy.target) for copy in copies]).T
        for pool in self.pools:
            pool.copy_blocks(sources, targets)

    def clear_blocks(self, blocks: Collection[BlockKey]) -> None:
        """Set whole blocks to zero, in every layer that has them."""
        clear_blocks(self.pools, blocks, self._has_window_pools)

    def num_attends(self) -> list[int]:
        """How often each layer attended through its cache."""
        return [cache.num_attends for cache in self.caches]

    def state(self) -> list[mx.array]:
        """The pools' arrays, to evaluate at the end of each step."""
        return [array for pool in self.pools for array in pool.arrays()]

    def marker(self) -> mx.array:
        """One number that is computed when a step without logits is done, and that shares no memory with a pool."""
        return self.pools[-1].values[0, 0] + 0.0

    def close(self) -> None:
        """Drop pools and caches."""
        self.pools.clear()
        self.caches.clear()


def find_decoder(model: Model) -> Model | None:
    """The part of ``model`` that makes hidden states, without the head."""
    owner = model.get("language_model", model)
    return next((owner[name] for name in _DECODER_NAMES if owner.get(name) is not None), None)


def select_rows_in(model: Model) -> RowSelector:
    """Let the decoder inside ``model`` drop rows. Where none is found the returned selector is never used."""
    decoder = find_decoder(model)
    if decoder is None:
        return RowSelector()
    if not isinstance(decoder, _SelectsRows):
        base = type(decoder)
        decoder.__class__ = type(base.__name__, (_SelectsRows, base), {})
        decoder.row_selector = RowSelector()
    selector: RowSelector = decoder.row_selector
    return selector
