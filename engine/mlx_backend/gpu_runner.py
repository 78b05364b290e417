"""Runs steps on a GPU with one step in flight: the engine's ``ModelRunner`` where the paged kernels work.

Owns: the order inside a step (block copies, forward, sampling, start), its time, the choice of rungs by measurement,
the one-thread rule, freeing. Must not know: why rows were chosen, text, requests' lives beyond their ids.

A step is started before the one before it is read: its decode rows take the tokens that they continue from on the
device. What the host decides from a token (the end of a request, say) is one step late and costs that row one step.
"""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from engine.batch import StepBatch, StepOutput
from engine.interfaces import ModelFacts
from engine.mlx_backend.geometries import pages_chunks
from engine.mlx_backend.gpu_cache import KernelBook
from engine.mlx_backend.gpu_inputs import GpuInputBuilder, HostStep
from engine.mlx_backend.gpu_model import GpuModel
from engine.mlx_backend.gpu_sampler import GpuSampler, GpuSamples
from engine.mlx_backend.kernels.launch import KernelFactory
from engine.mlx_backend.kernels.sampling import SampleKernel
from engine.mlx_backend.kernels.tiling import Tuning
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.model_runner import KvDtype, resolve_kv_dtype
from engine.mlx_backend.row_guides import RowGuides
from engine.mlx_backend.row_products import Use
from engine.mlx_backend.rungs import rung_for, rungs_up_to, token_rung, token_rungs
from engine.mlx_backend.speculation import verify
from engine.mlx_backend.step_clock import StepClock

_WARM_UP_STEPS = 2
_MEASURED_STEPS = 11
# Steps with larger chunks wait for the GPU whatever the host does; it is the small ones that ways differ for.
_MEASURED_CHUNK_TOKENS = 64
# While serving the host has half a millisecond more to do per step than while this is measured.
_NEARLY_AS_FAST = 1.05


class _PendingStep:
    """A step on its way."""

    def __init__(
        self,
        batch: StepBatch,
        samples: GpuSamples | None,
        waits_for: list[mx.array],
        elapsed_s: Callable[[], float],
    ) -> None:
        self._step_index, self._samples, self._waits_for = batch.step_index, samples, waits_for
        self._elapsed_s = elapsed_s
        self._drafting = tuple(row for row in batch.rows if row.draft_token_ids)

    def result(self) -> StepOutput:
        """Wait for the step. Raises what its computation raised."""
        mx.eval(self._waits_for)
        read = self._samples.read() if self._samples is not None else ({}, {})
        tokens, failures, further = verify(self._drafting, *read)
        return StepOutput(self._step_index, tokens, self._elapsed_s(), failures, further)


class GpuModelRunner:
    """Steps of one loaded model over its own pools, with the kernels of ``factory``.

    ``samples_on_device``: whether the sampling kernel is used. Used from one thread: the one that built it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        slots: int,
        max_chunk_tokens: int,
        factory: KernelFactory,
        tuning: Tuning,
        kv_dtype: KvDtype = "auto",
        kv_bits: int | None = None,
        num_window_blocks: int | None = None,
        samples_on_device: bool = True,
        compiles: bool = True,
    ) -> None:
        dtype = resolve_kv_dtype(loaded, kv_dtype)
        self._thread_id = threading.get_ident()
        self._facts = dataclasses.replace(
            loaded.facts,
            kv_bytes_per_token=loaded.kv_bytes_per_token(dtype, kv_bits),
            guides=loaded.grammars is not None,
            verifies_drafts=True,
        )
        self._slots, self._max_chunk_tokens = slots, max_chunk_tokens
        self._model: GpuModel | None = GpuModel(
            loaded,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            book=KernelBook(block_size, factory, tuning, kv_bits),
            sampling=SampleKernel(factory) if samples_on_device else None,
            num_window_blocks=num_window_blocks,
            compiles=compiles,
        )
        self._guides = RowGuides(loaded.grammars)
        self._sampler = GpuSampler(slots, loaded.facts.vocab_size, self._guides)
        self._inputs = GpuInputBuilder(
            block_size=block_size,
            max_model_len=loaded.facts.max_model_len,
            slots=slots,
            vocab_size_tokens=loaded.facts.vocab_size,
            windows=(layer.window or 0 for layer in loaded.layers),
            pages_chunks=pages_chunks(loaded, block_size, tuning),
            num_window_blocks=num_window_blocks,
        )
        self._clock = StepClock()

    @property
    def facts(self) -> ModelFacts:
        """Facts of the loaded model, with the pool's own dtype."""
        return self._facts

    @property
    def max_steps_in_flight(self) -> int:
        """Two: one computes while the host reads the other and prepares the next."""
        return 2

    @property
    def rung_times_s(self) -> dict[int, float]:
        """Measured times of decode steps by number of rows, attention left out; empty before ``warm_up``."""
        return dict(self._inputs.rung_times_s)

    def launch(self, batch: StepBatch) -> _PendingStep:
        """Build the step and start it."""
        model, elapsed_s = self._checked(), self._clock.begin()
        self._guides.prepare(batch.rows)
        if batch.block_copies:
            model.copy_blocks(batch.block_copies)
        host = self._inputs.build(batch)
        samples = None
        if any(row is not None and row.samples for row in host.head_rows):
            samples = self._sampler.sample(model, host)
        else:
            model.logits(host, self._sampler.last_tokens)  # for the pools' sake; the head is never computed
        waits_for = [*model.versions, *self._sampler.state(), *(samples.arrays() if samples is not None else ())]
        mx.async_eval(waits_for)  # type: ignore[no-untyped-call]
        return _PendingStep(batch, samples, waits_for, elapsed_s)

    def warm_up(self) -> None:
        """Run every size of step, so that nothing is compiled or searched for while people wait."""
        self.measure_rungs()
        if self._inputs.pages_chunks:
            self._measure_chunk_use()
            for num_rows in (0, rung_for(self._slots)):
                for num_tokens in token_rungs(self._max_chunk_tokens):
                    self._start(self._inputs.empty(num_rows, num_tokens)).read()

    def measure_rungs(self) -> None:
        """Time decode steps of every size: from then on the fastest sufficient rung is taken, and at each the fastest
        way to compute its products."""
        products = self._checked().products
        times_s = {}
        for rung in rungs_up_to(self._slots):
            host = self._inputs.empty(rung)
            if products is None:
                times_s[rung] = self._step_time_s(host)
                continue
            by_use = {}
            for use in products.choices(rung):
                products.uses[rung] = use
                by_use[use] = self._step_time_s(host)
            products.uses[rung] = _best(by_use)
            times_s[rung] = by_use[products.uses[rung]]
        self._inputs.rung_times_s = times_s

    def _measure_chunk_use(self) -> None:
        """Time a step with a small chunk by every way to compute its products, and keep the fastest."""
        products = self._checked().products
        if products is None:
            return
        num_rows = rung_for(self._slots)
        num_tokens = min(_MEASURED_CHUNK_TOKENS, self._max_chunk_tokens)
        host = self._inputs.empty(num_rows, token_rung(num_tokens))
        by_use = {}
        for use in products.choices(num_rows + num_tokens):
            products.chunk_use = use
            by_use[use] = self._step_time_s(host)
        products.chunk_use = _best(by_use)

    def _step_time_s(self, host: HostStep) -> float:
        """Seconds per step of this size with one step in flight, attention left out."""
        for _ in range(_WARM_UP_STEPS):
            self._start(host).read()
        durations_s, last = [], self._start(host)
        for _ in range(_MEASURED_STEPS):
            started_s, following = time.perf_counter(), self._start(host)
            last.read()
            durations_s.append(time.perf_counter() - started_s)
            last = following
        last.read()
        return statistics.median(durations_s)

    def _start(self, host: HostStep) -> GpuSamples:
        model = self._checked()
        samples = self._sampler.sample(model, host)
        mx.async_eval([*samples.arrays(), *model.versions])  # type: ignore[no-untyped-call]
        return samples

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget what is held for requests that finished or were preempted."""
        self._sampler.forget(request_ids)

    def close(self) -> None:
        """Free pools and give MLX's cached memory back."""
        if self._model is not None:
            self._checked().close()
            self._guides.close()
            self._model = None
            mx.clear_cache()

    def _checked(self) -> GpuModel:
        assert threading.get_ident() == self._thread_id, "MLX work belongs to the thread that built the runner"
        assert self._model is not None, "the runner is closed"
        return self._model


def _best(by_use: dict[Use, float]) -> Use:
    """Of the nearly fastest the one with the fewest launches: a busier host would make it the fastest."""
    fastest_s = min(by_use.values())
    return max(use for use, time_s in by_use.items() if time_s <= fastest_s * _NEARLY_AS_FAST)
