"""Runs an mlx-lm model whose layers mix along the sequence: decode rows in one pass ``[B, 1]``, each chunk in its own.

Owns: pools of keys and values and of recurrent state, the passes of a step. Must not know: scheduling, sampling, which
state entry is whose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.batch import BatchRow, BlockCopy, StateSave, StepBatch
from engine.mlx_backend import attention, cpu_activations
from engine.mlx_backend.cache_layout import CacheLayout
from engine.mlx_backend.input_batch import BlockKey, Grouping, InputBuilder, StepInputs
from engine.mlx_backend.mlx_lm_parts import Model
from engine.mlx_backend.packed_model import select_rows_in
from engine.mlx_backend.paged_cache import LayerPool, StepHolder
from engine.mlx_backend.pools import clear_blocks, make_pools
from engine.mlx_backend.sequence_caches import GatheredLayerCache, PassInputs, SequenceLayerCache
from engine.mlx_backend.state_pool import StateCache, StateHolder, StatePool, StateRows


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward of the model, and the entries (source, target) that are copied after it."""

    inputs: PassInputs
    states: StateRows
    saves: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RowsStep:
    """A step in passes. ``loads``: entries (source, target) that are copied before them."""

    passes: tuple[Pass, ...]
    loads: tuple[tuple[int, int], ...]
    sampling_rows: tuple[BatchRow, ...]


class RowModel:
    """One model over its own pools. Use from one thread.

    ``batches_decodes`` False: each decode row is a pass of its own. ``gathers``: the model attends by itself,
    ``masks_by_group`` with an axis of its scores for head groups.
    ``num_state_entries``: state of every slot, then saved copies. ``settles`` starts each pass before the next is
    built, so that a pass writes to pools that nobody waits to read.
    """

    def __init__(
        self,
        model: Model,
        layout: CacheLayout,
        *,
        num_blocks: int,
        block_size: int,
        dtype: mx.Dtype,
        max_model_len: int,
        kv_bits: int | None = None,
        num_window_blocks: int | None = None,
        num_state_entries: int,
        batches_decodes: bool = True,
        gathers: bool = False,
        masks_by_group: bool = False,
    ) -> None:
        attention.take_over(model)
        cpu_activations.take_over(model)
        self.settles = True
        self._model = model
        self._selector = select_rows_in(model)
        self._holder, self._state_holder = StepHolder(), StateHolder()
        self._batches_decodes, self._gathers = batches_decodes, gathers
        self.pools: list[LayerPool] = make_pools(
            layout.attention, num_blocks, block_size, dtype, kv_bits, num_window_blocks
        )
        self.states = StatePool(layout.states, num_state_entries)
        self.attention_caches: list[SequenceLayerCache | GatheredLayerCache] = [
            GatheredLayerCache(pool, self._holder, masks_by_group=masks_by_group)
            if gathers
            else SequenceLayerCache(pool, self._holder, max_model_len)
            for pool in self.pools
        ]
        self._state_caches = [StateCache(states, self._state_holder) for states in self.states.layers]
        self._caches = layout.build(self.attention_caches, self._state_caches)
        self._has_window_pools = num_window_blocks is not None
        self.inputs = InputBuilder(
            (shape.kind for shape in layout.attention), num_blocks, block_size, num_window_blocks
        )

    def build(self, batch: StepBatch, last_tokens: mx.array | None = None) -> RowsStep:
        """The step's passes; ``last_tokens`` int32 ``[slots]`` for rows whose token is in flight."""
        together = [row for row in batch.rows if self._decodes_together(row)]
        saves: dict[int, list[StateSave]] = {save.slot: [] for save in batch.state_saves}
        for save in batch.state_saves:
            saves[save.slot].append(save)
        passes = [self._decode_pass(batch, together, saves, last_tokens)] if together else []
        for row in batch.rows:
            if not self._decodes_together(row):
                passes += self._chunk_passes(batch, row, saves.get(row.slot, ()), last_tokens)
        return RowsStep(
            passes=tuple(passes),
            loads=tuple((load.entry, load.slot) for load in batch.state_loads),
            sampling_rows=tuple(row for each in passes for row in each.inputs.sampling_rows),
        )

    def blocks_begun(self, row: BatchRow) -> list[BlockKey]:
        """Blocks whose first position ``row`` writes in this step."""
        return self.inputs.blocks_begun(row)

    def forward(self, step: RowsStep) -> mx.array:
        """Logits ``[R, vocab]`` of the sampling rows, lazily; the pools hold the step's results afterwards."""
        self.states.copy(step.loads)
        outputs: list[mx.array] = []
        for index, each in enumerate(step.passes):
            logits = self._run(each)
            self.states.copy(each.saves)
            if each.inputs.sampling_rows:
                outputs.append(logits)
            if self.settles and index + 1 < len(step.passes):
                mx.async_eval([*self.state(), *outputs])  # type: ignore[no-untyped-call]
        if not outputs:
            return mx.zeros((0, 1))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks of every layer."""
        sources, targets = np.array([(copy.source, copy.target) for copy in copies]).T
        for pool in self.pools:
            pool.copy_blocks(sources, targets)

    def clear_blocks(self, blocks: Collection[BlockKey]) -> None:
        """Set whole blocks to zero, in every layer that has them."""
        clear_blocks(self.pools, blocks, self._has_window_pools)

    def num_attends(self) -> list[int]:
        """How often each layer attended through its cache; empty where the model attends by itself."""
        return [cache.num_attends for cache in self.attention_caches if isinstance(cache, SequenceLayerCache)]

    def state(self) -> list[mx.array]:
        """The pools' arrays, to evaluate at the end of each step."""
        return [*(array for pool in self.pools for array in pool.arrays()), *self.states.arrays()]

    def marker(self) -> mx.array:
        """One number that is computed when a step without logits is done, and that shares no memory with a pool."""
        return self.state()[-1].reshape(-1)[:1] + 0

    def close(self) -> None:
        """Drop pools and caches."""
        self.pools.clear()
        self.attention_caches.clear()
        self._state_caches.clear()
        self.states.layers.clear()
        self._caches.clear()

    def _decodes_together(self, row: BatchRow) -> bool:
        """A row that begins its sequence has no state yet, so it cannot stand beside rows that have."""
        return self._batches_decodes and row.num_tokens == 1 and row.start > 0

    def _decode_pass(
        self,
        batch: StepBatch,
        rows: list[BatchRow],
        saves: dict[int, list[StateSave]],
        last_tokens: mx.array | None,
    ) -> Pass:
        grouping = Grouping.TOGETHER if self._gathers else Grouping.PACKED
        inputs = self.inputs.build(StepBatch(batch.step_index, tuple(rows)), last_tokens, grouping)
        slots = mx.array(np.array([row.slot for row in inputs.rows], np.int32))
        copies = tuple((save.slot, save.entry) for row in rows for save in saves.get(row.slot, ()))
        return Pass(_pass_inputs(inputs), StateRows(slots, fresh=False), copies)

    def _chunk_passes(
        self, batch: StepBatch, row: BatchRow, saves: Sequence[StateSave], last_tokens: mx.array | None
    ) -> list[Pass]:
        """The row's tokens, cut where a state is to be saved on the way."""
        end = row.start + row.num_tokens
        cuts = sorted({save.num_tokens for save in saves} | {end})
        passes, start = [], row.start
        for cut in cuts:
            part = dataclasses.replace(row, start=start, num_tokens=cut - start, samples=row.samples and cut == end)
            inputs = self.inputs.build(StepBatch(batch.step_index, (part,)), last_tokens, Grouping.SEQUENCE)
            entries = StateRows(mx.array([row.slot], mx.int32), fresh=start == 0)
            copies = tuple((save.slot, save.entry) for save in saves if save.num_tokens == cut)
            passes.append(Pass(_pass_inputs(inputs, start), entries, copies))
            start = cut
        return passes

    def _run(self, each: Pass) -> mx.array:
        inputs = each.inputs
        self._holder.inputs, self._state_holder.rows = inputs, each.states
        self._selector.rows, self._selector.used = inputs.head_rows, False
        on_cpu = mx.default_device().type == mx.cpu
        try:
            with cpu_activations.in_step() if on_cpu else nullcontext():
                logits: mx.array = self._model(inputs.tokens, cache=self._caches)
        finally:
            self._holder.inputs = self._state_holder.rows = self._selector.rows = self._selector.selected = None
            for cache in (*self.attention_caches, *self._state_caches):
                cache.forget()
        return self._selector.chosen(logits, inputs.head_rows)


def _pass_inputs(inputs: StepInputs, start: int | None = None) -> PassInputs:
    tokens = inputs.tokens if start is None else inputs.tokens.T
    return PassInputs(
        tokens=tokens,
        positions=inputs.positions,
        plans=inputs.plans,
        rows=inputs.rows,
        sampling_rows=inputs.sampling_rows,
        head_rows=inputs.head_rows,
        start=start,
    )
