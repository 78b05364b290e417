"""Runs steps on MLX: the engine's ``ModelRunner``.

Owns: the order inside a step (block copies, forward, sampling, evaluation), its time, the one-thread rule, freeing.
Must not know: why rows were chosen, text, requests' lives beyond their ids.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import mlx.core as mx
import numpy as np

from engine.batch import BatchRow, StepBatch, StepOutput
from engine.interfaces import ModelFacts
from engine.memory.window_blocks import HOLE
from engine.mlx_backend.activations import measure_activation_bytes
from engine.mlx_backend.embeddings import embeddings_of
from engine.mlx_backend.input_batch import BlockKey
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.packed_model import PackedModel
from engine.mlx_backend.row_guides import RowGuides
from engine.mlx_backend.row_model import RowModel
from engine.mlx_backend.sampler import Sampler, Samples
from engine.mlx_backend.speculation import verify
from engine.mlx_backend.step_clock import StepClock
from engine.mlx_backend.step_model import StepForm, StepModel

__all__ = ["KvDtype", "MlxModelRunner", "measure_activation_bytes", "resolve_kv_dtype"]

KvDtype = Literal["auto", "float32", "float16", "bfloat16"]


class _PendingStep:
    """A step whose values are on their way. Holds no pool array: that would make the next step copy the pool."""

    def __init__(
        self,
        batch: StepBatch,
        samples: Samples | None,
        done: mx.array,
        tainted_blocks: set[BlockKey],
        elapsed_s: Callable[[], float],
    ) -> None:
        self._step_index = batch.step_index
        self._drafting = tuple(row for row in batch.rows if row.draft_token_ids)
        self._samples = samples
        self._done = done
        self._tainted_blocks = tainted_blocks
        self._elapsed_s = elapsed_s
        self._taken_s: float | None = None
        self._error: Exception | None = None

    def end(self) -> None:
        """Wait for the computation and note the time that it took. What it raises is for ``result``."""
        if self._taken_s is not None:
            return
        try:
            mx.eval(self._done)
        except Exception as error:
            self._error = error
        self._taken_s = self._elapsed_s()

    def result(self) -> StepOutput:
        """Wait for the step. Raises what its computation raised."""
        self.end()
        if self._error is not None:
            raise self._error
        assert self._taken_s is not None
        read = self._samples.read() if self._samples is not None else ({}, {})
        tokens, failures, further = verify(self._drafting, *read)
        if self._samples is not None and failures:
            self._tainted_blocks.update(
                key for row in self._samples.rows if row.request_id in failures for key in _blocks_of(row)
            )
        return StepOutput(self._step_index, tokens, self._taken_s, failures, further)


class MlxModelRunner:
    """Steps of one loaded model over its own pools. Used from one thread: the one that built it.

    ``num_state_snapshots``: entries for saved recurrent state beside the slots' own. ``num_window_blocks``: blocks of
    sliding-window layers, where those have a pool of their own.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        slots: int,
        max_chunk_tokens: int,
        kv_dtype: KvDtype = "auto",
        kv_bits: int | None = None,
        num_state_snapshots: int = 0,
        num_window_blocks: int | None = None,
    ) -> None:
        dtype = resolve_kv_dtype(loaded, kv_dtype)
        self._thread_id = threading.get_ident()
        self._facts = dataclasses.replace(
            loaded.facts,
            kv_bytes_per_token=loaded.kv_bytes_per_token(dtype, kv_bits),
            guides=loaded.grammars is not None,
            is_alone=loaded.form is StepForm.SINGLE,
            verifies_drafts=loaded.form is StepForm.PACKED,
        )
        self._model: StepModel | None = loaded.step_model(
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            num_state_entries=slots + num_state_snapshots,
            kv_bits=kv_bits,
            num_window_blocks=num_window_blocks,
        )
        self._tainted_blocks: set[BlockKey] = set()
        self._guides = RowGuides(loaded.grammars)
        self._sampler = Sampler(
            slots, loaded.facts.vocab_size, host_may_wait=loaded.backend == "cpu", guides=self._guides
        )
        self._last_tokens = mx.zeros((slots,), mx.int32)
        self._clock = StepClock()
        # A step that was built while a packed pool was being read has been seen to copy one of its arrays.
        self._overlaps = loaded.backend == "cpu" and loaded.form is not StepForm.SINGLE and kv_bits is None
        self._chunk_in_flight = False
        self._newest: _PendingStep | None = None

    @property
    def facts(self) -> ModelFacts:
        """Facts of the loaded model, with the pool's own dtype."""
        return self._facts

    @property
    def max_steps_in_flight(self) -> int:
        """Two on the CPU, so that a decode step is prepared while another computes; one while a prompt chunk computes,
        so that a request that arrives then need not wait for two long steps. One on a GPU and with
        ``kv_bits``: pools are written by indexed assignment, which is in place there only between finished steps."""
        return 2 if self._overlaps and not self._chunk_in_flight else 1

    @property
    def state_bytes(self) -> int:
        """What recurrent state takes, the slots' own and saved copies."""
        model = self._checked()
        return model.states.num_bytes if isinstance(model, RowModel) else 0

    def launch(self, batch: StepBatch) -> _PendingStep:
        """Build the step and start it."""
        model, elapsed_s = self._checked(), self._clock.begin()
        self._guides.prepare(batch.rows)
        if batch.block_copies:
            model.copy_blocks(batch.block_copies)
        self._clear_tainted_blocks(model, batch)
        step = model.build(batch, self._last_tokens)
        logits, hidden = model.forward_both(step) if isinstance(model, PackedModel) else (model.forward(step), None)
        samples = self._sample(logits, hidden, step.sampling_rows) if step.sampling_rows else None
        done = samples.tokens if samples is not None else model.marker()
        produced = samples.arrays() if samples is not None else [done]
        # On the CPU the call below returns when most of this step is computed: only now can be seen when the one before
        # it ended. This one's graph is built by now, so nothing is lost.
        if self._newest is not None and self._overlaps:
            self._newest.end()
        mx.async_eval([*model.state(), *self._sampler.state(), self._last_tokens, *produced])  # type: ignore[no-untyped-call]
        self._chunk_in_flight = any(row.num_tokens > 1 for row in batch.rows)
        self._newest = _PendingStep(batch, samples, done, self._tainted_blocks, elapsed_s)
        return self._newest

    def _sample(self, logits: mx.array, hidden: mx.array | None, rows: tuple[BatchRow, ...]) -> Samples:
        slots = mx.array(np.array([row.slot for row in rows], dtype=np.int32))
        samples = self._sampler.sample(logits, rows, self._last_tokens[slots])
        self._last_tokens[slots] = samples.tokens.astype(mx.int32)
        return dataclasses.replace(samples, embeddings=embeddings_of(hidden, tuple(enumerate(rows))))

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget what is held for requests that finished or were preempted."""
        self._sampler.forget(request_ids)

    def close(self) -> None:
        """Free pools and give MLX's cached memory back."""
        if self._model is not None:
            self._checked().close()
            self._guides.close()
            self._model = self._newest = None
            mx.clear_cache()

    def _clear_tainted_blocks(self, model: StepModel, batch: StepBatch) -> None:
        """Zero a block that holds NaN of a failed row before another row begins it. A row reads its last block to the
        end, unwritten positions with weight 0: any number is harmless there, but 0 * NaN is NaN."""
        if not self._tainted_blocks:
            return
        begun = {block for row in batch.rows for block in model.blocks_begun(row)} & self._tainted_blocks
        if begun:
            model.clear_blocks(sorted(begun))
            self._tainted_blocks -= begun

    def _checked(self) -> StepModel:
        assert threading.get_ident() == self._thread_id, "MLX work belongs to the thread that built the runner"
        assert self._model is not None, "the runner is closed"
        return self._model


def _blocks_of(row: BatchRow) -> list[BlockKey]:
    of_window = [BlockKey(True, block_id) for block_id in row.window_block_ids if block_id != HOLE]
    return [BlockKey(False, block_id) for block_id in row.block_ids] + of_window


def resolve_kv_dtype(loaded: LoadedModel, kv_dtype: KvDtype) -> mx.Dtype:
    """The pool's dtype: ``auto`` is the dtype of the model's own keys."""
    dtypes = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
    return loaded.compute_dtype if kv_dtype == "auto" else dtypes[kv_dtype]
