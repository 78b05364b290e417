"""How a model's steps are computed: the forms, and making the model of a form.

Owns: the forms and their order, the interface that they share. Must not know: which form a model needs (probe.py finds
out), scheduling, sampling.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any, Protocol

import mlx.core as mx

from engine.batch import BatchRow, BlockCopy, StepBatch
from engine.mlx_backend.cache_layout import CacheLayout
from engine.mlx_backend.input_batch import BlockKey
from engine.mlx_backend.mlx_lm_parts import Model
from engine.mlx_backend.packed_model import PackedModel
from engine.mlx_backend.row_model import RowModel
from engine.mlx_backend.single_model import SingleModel


class StepForm(Enum):
    """From the fastest to the one that always works.

    ``PACKED``: all rows in one forward, each token its own batch row. ``BATCHED``: decode rows in one forward, each
    chunk in its own; what recurrent layers need. ``GATHERED``: the same, with keys and values handed to the model,
    which attends by itself (``GROUPED``: with scores that have an axis for head groups). ``SERIAL``: each row in a
    forward of its own, for models that compute with positions as plain numbers. ``SINGLE``: mlx-lm's own caches, one
    sequence at a time.
    """

    PACKED = "packed"
    BATCHED = "batched"
    GATHERED = "gathered"
    GROUPED = "grouped"
    SERIAL = "serial"
    SINGLE = "single"


class Step(Protocol):
    """A step's inputs."""

    @property
    def sampling_rows(self) -> tuple[BatchRow, ...]:
        """The rows whose logits are wanted, in the order of the logits."""
        ...


class StepModel(Protocol):
    """One model over its own pools. Used from one thread."""

    def build(self, batch: StepBatch, last_tokens: mx.array | None = None) -> Any:
        """The step's inputs; ``last_tokens`` int32 ``[slots]`` for rows whose token is in flight."""
        ...

    def forward(self, step: Any) -> mx.array:
        """Logits ``[R, vocab]`` of the sampling rows, lazily."""
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks of every layer."""
        ...

    def clear_blocks(self, blocks: Collection[BlockKey]) -> None:
        """Set whole blocks to zero, in every layer that has them."""
        ...

    def blocks_begun(self, row: BatchRow) -> list[BlockKey]:
        """Blocks whose first position ``row`` writes in this step."""
        ...

    def state(self) -> list[mx.array]:
        """Arrays to evaluate at the end of each step."""
        ...

    def marker(self) -> mx.array:
        """A small array that is computed when a step without logits is done."""
        ...

    def close(self) -> None:
        """Drop all that is held."""
        ...


def forms_for(layout: CacheLayout | None) -> tuple[StepForm, ...]:
    """Forms that may suit a model, to be tried in this order; the last one suits every model."""
    if layout is None:
        return (StepForm.SINGLE,)
    by_rows = (StepForm.GATHERED, StepForm.GROUPED, StepForm.SERIAL, StepForm.SINGLE)
    packs = not layout.states and not any(isinstance(entry, tuple) for entry in layout.entries)
    return (StepForm.PACKED if packs else StepForm.BATCHED, *by_rows)


def make_step_model(
    model: Model,
    layout: CacheLayout | None,
    form: StepForm,
    *,
    num_blocks: int,
    block_size: int,
    dtype: mx.Dtype,
    max_model_len: int,
    num_state_entries: int,
    kv_bits: int | None = None,
    num_window_blocks: int | None = None,
) -> PackedModel | RowModel | SingleModel:
    """``model`` in ``form`` with pools of ``num_blocks`` blocks and ``num_state_entries`` recurrent states.

    ``kv_bits``: keys and values are held with so many bits, and read in ``dtype``. ``num_window_blocks``: blocks of
    sliding-window layers, where those have a pool of their own.
    """
    if form is StepForm.SINGLE or layout is None:
        return SingleModel(model)
    sizes: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "kv_bits": kv_bits,
        "num_window_blocks": num_window_blocks,
    }
    if form is StepForm.PACKED:
        return PackedModel(model, layout.attention, **sizes)
    return RowModel(
        model,
        layout,
        **sizes,
        num_state_entries=num_state_entries,
        batches_decodes=form is not StepForm.SERIAL,
        gathers=form is not StepForm.BATCHED,
        masks_by_group=form is StepForm.GROUPED,
    )
