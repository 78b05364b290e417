"""Runs an mlx-lm model on mlx-lm's own caches: one sequence at a time, for models whose past cannot be pooled.

Owns: the caches of the sequence that runs now. Must not know: scheduling, sampling. A sequence begins at position 0 and
goes on without a gap: there is nothing to share a prefix from, and a preempted sequence is computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from engine.batch import BatchRow, BlockCopy, StepBatch
from engine.mlx_backend.input_batch import BlockKey, tokens_of_rows
from engine.mlx_backend.mlx_lm_parts import Model, make_prompt_cache


@dataclass(frozen=True, slots=True)
class SingleStep:
    """One forward pass of one row: ``tokens`` int32 ``[1, L]``."""

    row: BatchRow
    tokens: mx.array

    @property
    def sampling_rows(self) -> tuple[BatchRow, ...]:
        """The row, if its logits are wanted."""
        return (self.row,) if self.row.samples else ()


class SingleModel:
    """One model and one sequence. Use from one thread."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._caches: list[Any] = []
        self._num_computed = 0

    def build(self, batch: StepBatch, last_tokens: mx.array | None = None) -> SingleStep:
        """The one row's tokens; ``last_tokens`` int32 ``[slots]`` where its token is in flight."""
        (row,) = batch.rows
        assert not batch.block_copies, "a sequence of its own shares no blocks"
        return SingleStep(row, tokens_of_rows((row,), last_tokens)[None])

    def forward(self, step: SingleStep) -> mx.array:
        """Logits ``[1, vocab]`` of the row's last token, lazily."""
        row = step.row
        if row.start == 0:
            self._caches = make_prompt_cache(self._model)
        assert row.start in (0, self._num_computed), "a sequence of its own cannot skip positions"
        logits: mx.array = self._model(step.tokens, cache=self._caches)
        self._num_computed = row.start + row.num_tokens
        return logits[:, -1]

    def state(self) -> list[mx.array]:
        """What the caches hold, to evaluate at the end of each step."""
        held = tree_flatten([cache.state for cache in self._caches])
        return [pair[1] for pair in held if isinstance(pair[1], mx.array)]

    def marker(self) -> mx.array:
        """One number that is computed when a step without logits is done."""
        return self.state()[-1].reshape(-1)[:1] + 0

    def blocks_begun(self, row: BatchRow) -> list[BlockKey]:
        """No block is ever written."""
        return []

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Never asked: nothing is shared."""
        raise AssertionError("a sequence of its own shares no blocks")

    def clear_blocks(self, blocks: Collection[BlockKey]) -> None:
        """No block holds anything."""

    def close(self) -> None:
        """Drop the caches."""
        self._caches.clear()
