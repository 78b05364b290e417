"""Chooses the runner for a loaded model: the kernels' where they prove themselves on this machine, else the plain one.

Owns: the check at start, and what is said when a kernel is turned off. Must not know: how either runner works.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from functools import partial
from typing import TypedDict

from engine.interfaces import ModelRunner
from engine.mlx_backend.geometries import layer_geometries
from engine.mlx_backend.gpu_cache import KernelBook
from engine.mlx_backend.gpu_runner import GpuModelRunner
from engine.mlx_backend.kernel_check import (
    CHUNK_ATTENTION,
    NORMS,
    OPTIONAL,
    PROJECTIONS,
    ROTATION,
    SAMPLING,
    Trials,
    Verdict,
    norm_trial,
    projection_trial,
    rotation_trial,
    sampling_trial,
)
from engine.mlx_backend.kernels.launch import KernelFactory, gpu_factory, gpu_target
from engine.mlx_backend.kernels.tiling import TUNINGS, Tuning
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.model_runner import KvDtype, MlxModelRunner, resolve_kv_dtype
from engine.mlx_backend.step_check import steps_trial
from engine.mlx_backend.step_model import StepForm

logger = logging.getLogger(__name__)

_OTHER_FORM = "Kernels off: they compute packed steps, and this model's are {}."


class _Common(TypedDict):
    """What both runners are made of."""

    num_blocks: int
    block_size: int
    slots: int
    max_chunk_tokens: int
    kv_dtype: KvDtype
    kv_bits: int | None
    num_window_blocks: int | None


def make_runner(
    loaded: LoadedModel,
    *,
    num_blocks: int,
    block_size: int,
    slots: int,
    max_chunk_tokens: int,
    kv_dtype: KvDtype = "auto",
    num_state_snapshots: int = 0,
    num_window_blocks: int | None = None,
    kv_bits: int | None = None,
) -> ModelRunner:
    """The fastest runner that computes ``loaded`` rightly here. A kernel that is turned off is named in the log and in
    the facts' disclosures; so is a form of steps that the kernels do not know."""
    common: _Common = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "slots": slots,
        "max_chunk_tokens": max_chunk_tokens,
        "kv_dtype": kv_dtype,
        "kv_bits": kv_bits,
        "num_window_blocks": num_window_blocks,
    }
    plain_runner = partial(MlxModelRunner, **common, num_state_snapshots=num_state_snapshots)
    if kv_bits is not None:
        loaded = _disclosing(loaded, [f"Keys and values have {kv_bits} bits (`kv_bits`), which changes answers."])
    target = gpu_target() if loaded.backend != "cpu" else None
    if target is None:
        return plain_runner(loaded)
    if loaded.form is not StepForm.PACKED:
        return plain_runner(_disclosing(loaded, [_OTHER_FORM.format(loaded.form.value)]))
    factory = gpu_factory(target)
    loaded, tuning, failed = _prove(loaded, block_size, kv_dtype, kv_bits, factory, TUNINGS[target])
    if not failed <= OPTIONAL:
        return plain_runner(loaded)
    runner = GpuModelRunner(
        loaded,
        **common,
        factory=factory,
        tuning=tuning,
        samples_on_device=SAMPLING not in failed,
    )
    runner.warm_up()
    return runner


def _prove(
    loaded: LoadedModel,
    block_size: int,
    kv_dtype: KvDtype,
    kv_bits: int | None,
    factory: KernelFactory,
    tuning: Tuning,
) -> tuple[LoadedModel, Tuning, set[str]]:
    """Try every kernel, then whole steps: the model with what is to be disclosed, the tuning without the kernels that
    failed, and the names of these."""
    pool_verdicts = check_pool_kernels(loaded, kv_dtype, KernelBook(block_size, factory, tuning, kv_bits))
    verdicts = [*pool_verdicts, *check_other_kernels(loaded, factory, tuning)]
    failed = {verdict.name for verdict in verdicts if verdict.problem}
    tuning = _without(tuning, failed)
    if failed <= OPTIONAL:
        verdicts.append(steps_trial(loaded, block_size, factory, tuning, kv_bits))
        failed |= {verdict.name for verdict in verdicts[-1:] if verdict.problem}
    problems = {verdict.name: verdict.problem for verdict in reversed(verdicts) if verdict.problem}
    sentences = [f"Kernel off: {name} {problem}." for name, problem in problems.items()]
    return _disclosing(loaded, sentences), tuning, failed


def _without(tuning: Tuning, failed: set[str]) -> Tuning:
    return dataclasses.replace(
        tuning,
        pages_chunks=tuning.pages_chunks and CHUNK_ATTENTION not in failed,
        projects_rows=tuning.projects_rows and PROJECTIONS not in failed,
        rotates_heads=tuning.rotates_heads and ROTATION not in failed,
        fuses_norms=tuning.fuses_norms and NORMS not in failed,
    )


def check_pool_kernels(loaded: LoadedModel, kv_dtype: KvDtype, book: KernelBook) -> Iterator[Verdict]:
    """Verdicts on every kernel that reads or writes a pool of ``book``'s kind, each distinct kind of layer apart."""
    pool_dtype = resolve_kv_dtype(loaded, kv_dtype)
    for geometry in layer_geometries(loaded, book.block_size):
        yield from Trials(geometry, loaded.compute_dtype, pool_dtype, book).run()
    if any(layer.k_head_dim != layer.v_head_dim for layer in loaded.layers):
        yield Verdict("paged decode attention", "does not know keys and values of different sizes", float("inf"))


def check_other_kernels(loaded: LoadedModel, factory: KernelFactory, tuning: Tuning) -> Iterator[Verdict]:
    """Verdicts on the kernels that know no pool, as far as ``loaded`` needs them."""
    if tuning.projects_rows and loaded.compute_dtype.size == 2:
        yield projection_trial(factory, loaded.compute_dtype)
    if tuning.rotates_heads:
        for head_dim in sorted({layer.k_head_dim for layer in loaded.layers if layer.k_head_dim % 2 == 0}):
            yield rotation_trial(factory, loaded.compute_dtype, head_dim)
    if tuning.fuses_norms:
        yield norm_trial(factory, loaded.compute_dtype)
    yield sampling_trial(factory, loaded.compute_dtype)


def _disclosing(loaded: LoadedModel, sentences: list[str]) -> LoadedModel:
    for sentence in sentences:
        logger.warning("%s", sentence)
    facts = dataclasses.replace(loaded.facts, disclosures=(*loaded.facts.disclosures, *sentences))
    return dataclasses.replace(loaded, facts=facts)
