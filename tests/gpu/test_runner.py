"""The GPU runner on this machine's GPU: the same text however it runs, and nothing left behind."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest

from engine.mlx_backend.gpu_runner import GpuModelRunner
from engine.mlx_backend.kernels.launch import gpu_factory, gpu_target
from engine.mlx_backend.kernels.tiling import TUNINGS
from engine.mlx_backend.loaded_model import LoadedModel
from engine.request import SamplingParams
from tests.gpu.llama_shape import load
from tests.gpu.serving import GREEDY, Run, Work, serve

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 400, 16, 2048
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(MAX_MODEL_LEN, num_hidden_layers=4, hidden_size=1024, intermediate_size=2048, num_attention_heads=8)


def run(
    loaded: LoadedModel, works: list[Work], slots: int, *, compiles: bool = True, kv_bits: int | None = None
) -> Run:
    target = gpu_target()
    assert target is not None
    runner = GpuModelRunner(
        loaded,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        slots=slots,
        max_chunk_tokens=256,
        factory=gpu_factory(target),
        tuning=TUNINGS[target],
        kv_bits=kv_bits,
        compiles=compiles,
    )
    return serve(
        runner,
        works,
        slots=slots,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        # Sizes of chunks follow measured times, and other sizes round otherwise: here they must not depend on how long
        # the first steps take to compile.
        target_stall_s=1e6,
    )


def works(count: int, sampling: SamplingParams) -> list[Work]:
    draw = random.Random(1)
    return [Work(tuple(draw.randrange(1000) for _ in range(draw.randint(1, 400))), 24, sampling) for _ in range(count)]


@pytest.mark.parametrize("kv_bits", [None, 8, 4])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_compiled_steps_give_the_text_of_eager_ones(
    loaded: LoadedModel, sampling: SamplingParams, kv_bits: int | None
) -> None:
    requests = works(9, sampling)
    compiled = run(loaded, requests, 4, kv_bits=kv_bits)
    assert compiled.first_tokens == run(loaded, requests, 4, compiles=False, kv_bits=kv_bits).first_tokens


def test_a_thousand_steps_leave_nothing_behind(loaded: LoadedModel) -> None:
    requests = [Work((5, 6, 7), 1000)]
    run(loaded, requests, 2)
    mx.clear_cache()
    before_bytes = mx.get_active_memory()
    run(loaded, requests, 2)
    mx.clear_cache()
    assert mx.get_active_memory() - before_bytes < 2**20
