"""The kernels on this machine's GPU: the same cases as on the emulator, and the trials of the start."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.mlx_backend.gpu_cache import KernelBook
from engine.mlx_backend.kernel_check import Trials, norm_trial, projection_trial, rotation_trial, sampling_trial
from engine.mlx_backend.kernels import reference
from engine.mlx_backend.kernels.launch import gpu_factory, gpu_target
from engine.mlx_backend.kernels.paged_attention import PagedKernels
from engine.mlx_backend.kernels.tiling import TUNINGS, Geometry
from tests.kernel_cases import CONFIGURATIONS, PACKED_CONFIGURATIONS, Case, random_lengths


@pytest.fixture(autouse=True)
def _reference_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's CUDA products of fp32 numbers are rounded to tf32, too coarse for a reference."""
    mx.set_default_device(mx.Device(mx.gpu, 0))
    on_the_gpu = reference.decode

    def on_the_cpu(*arguments: Any) -> Any:
        with mx.stream(mx.Device(mx.cpu, 0)):
            results = on_the_gpu(*arguments)
            mx.eval(results)
        return results

    monkeypatch.setattr(reference, "decode", on_the_cpu)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_decode(name: str) -> None:
    geometry, dtype, pool_dtype, tuning = CONFIGURATIONS[name]
    target = gpu_target()
    assert target is not None
    kernels = PagedKernels(geometry, dtype, pool_dtype, gpu_factory(target), tuning)
    random = np.random.default_rng(7)
    for seed, (num_rows, longest) in enumerate(
        [(1, 1), (1, 5000), (2, 17), (5, 1500), (12, 200), (33, 40), (16, 2000)]
    ):
        lengths = random_lengths(random, num_rows, longest, geometry.block_size)
        Case(geometry, dtype, pool_dtype, lengths, seed).check_decode(kernels)


@pytest.mark.parametrize("name", PACKED_CONFIGURATIONS)
def test_decode_over_few_bits(name: str) -> None:
    geometry, dtype, pool_dtype, kv_bits, tuning = PACKED_CONFIGURATIONS[name]
    target = gpu_target()
    assert target is not None
    kernels = PagedKernels(geometry, dtype, pool_dtype, gpu_factory(target), tuning, kv_bits)
    random = np.random.default_rng(8)
    for seed, (num_rows, longest) in enumerate([(1, 1), (1, 3000), (5, 700), (33, 40)]):
        lengths = random_lengths(random, num_rows, longest, geometry.block_size)
        Case(geometry, dtype, pool_dtype, lengths, seed, kv_bits).check_decode(kernels)


@pytest.mark.parametrize("kv_bits", [0, 8, 4], ids=["plain pool", "8 bits", "4 bits"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("window", [0, 48], ids=["all positions", "a window"])
def test_every_trial_passes(dtype: mx.Dtype, window: int, kv_bits: int) -> None:
    target = gpu_target()
    assert target is not None
    factory = gpu_factory(target)
    geometry = Geometry(8, 2, 128, 16, 128**-0.5, window)
    book = KernelBook(16, factory, TUNINGS[target], kv_bits or None)
    verdicts = [*Trials(geometry, dtype, dtype, book).run(), sampling_trial(factory, dtype)]
    verdicts += [rotation_trial(factory, dtype, 128), norm_trial(factory, dtype)]
    if TUNINGS[target].projects_rows:
        verdicts.append(projection_trial(factory, dtype))
    assert [verdict for verdict in verdicts if verdict.problem] == []
