"""The GPU runner on the CPU: its kernels' text run by the emulator, its pipeline by the real scheduler and core."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import mlx.core as mx
import pytest

from engine.batch import BlockCopy, StepBatch
from engine.core.engine_core import EngineCore
from engine.memory.window_blocks import WindowConfig, most_ahead_tokens, num_blocks_needed
from engine.mlx_backend.gpu_inputs import HostStep
from engine.mlx_backend.gpu_runner import GpuModelRunner
from engine.mlx_backend.kernels.tiling import Tuning
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.loader import describe_model
from engine.mlx_backend.model_runner import MlxModelRunner
from engine.mlx_backend.row_products import Use
from engine.model_source import ModelSource
from engine.request import EngineRequest, SamplingParams, TokenOutput
from engine.scheduler.prompt_lookup import PromptLookup
from engine.scheduler.scheduler import Scheduler, SchedulerConfig
from engine.scheduler.speculation import DraftCosts
from tests.kernel_emulator import COMPILER, Emulator
from tests.mlx.driver import GREEDY, Driver, Sequence
from tests.mlx.tiny_models import build, tiny_model

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

NUM_BLOCKS, BLOCK_SIZE, SLOTS = 64, 8, 4
TUNING = Tuning(simds=2)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("kernels"))


def gpu_runner(
    loaded: LoadedModel,
    emulator: Emulator,
    *,
    samples_on_device: bool = True,
    tuning: Tuning = TUNING,
    kv_bits: int | None = None,
    num_window_blocks: int | None = None,
) -> GpuModelRunner:
    return GpuModelRunner(
        loaded,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        slots=SLOTS,
        max_chunk_tokens=32,
        factory=emulator,
        tuning=tuning,
        kv_bits=kv_bits,
        num_window_blocks=num_window_blocks,
        samples_on_device=samples_on_device,
        compiles=False,
    )


def cpu_runner(loaded: LoadedModel, kv_bits: int | None = None) -> MlxModelRunner:
    return MlxModelRunner(
        loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, slots=SLOTS, max_chunk_tokens=32, kv_bits=kv_bits
    )


def prompts(count: int, longest: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(200) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def serve(
    runner: GpuModelRunner | MlxModelRunner,
    requests: list[tuple[list[int], SamplingParams]],
    slots: int = SLOTS,
    max_draft_tokens: int = 0,
    window: WindowConfig | None = None,
) -> list[TokenOutput]:
    """All ``requests`` through scheduler and core; one output each, its tokens and logprobs joined."""
    config = SchedulerConfig(
        slots=slots,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=512,
        max_chunk_tokens=24,
        max_steps_in_flight=runner.max_steps_in_flight,
        max_draft_tokens=max_draft_tokens,
        window=window,
    )
    ticks = itertools.count()
    core = EngineCore(Scheduler(config), runner, lambda: float(next(ticks)))
    for i, (prompt, sampling) in enumerate(requests):
        core.add(EngineRequest(str(i), tuple(prompt), sampling, 0.0))
    outputs: dict[str, list[TokenOutput]] = {str(i): [] for i in range(len(requests))}
    while core.has_work:
        for output in core.step():
            outputs[output.request_id].append(output)
    core.close()
    return [
        TokenOutput(
            request_id,
            tuple(token for part in parts for token in part.token_ids),
            tuple(logprobs for part in parts for logprobs in part.logprobs),
            parts[-1].finish_reason,
            parts[-1].error,
        )
        for request_id, parts in outputs.items()
    ]


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "gemma3_text", "gpt2"])
def test_the_pipeline_gives_the_cpu_runners_text(architecture: str, emulator: Emulator) -> None:
    """Rows join and leave, chunks ride along, every step but the first is launched before the last is read."""
    loaded = tiny_model(architecture)
    requests = [(prompt, SamplingParams(temperature=0.0, max_tokens=3 + i)) for i, prompt in enumerate(prompts(9, 60))]
    wanted = [output.token_ids for output in serve(cpu_runner(loaded), requests)]
    assert [output.token_ids for output in serve(gpu_runner(loaded, emulator), requests)] == wanted


@pytest.mark.parametrize(("architecture", "kv_bits"), [("llama", 8), ("gemma3_text", 4)])
def test_over_few_bits_the_text_is_the_cpu_runners_with_as_many(
    architecture: str, kv_bits: int, emulator: Emulator
) -> None:
    """Prompts and single tokens alike: what a step attends over is what its pool gives back."""
    loaded = tiny_model(architecture, hidden_size=128, head_dim=32)
    requests = [(prompt, SamplingParams(temperature=0.0, max_tokens=3 + i)) for i, prompt in enumerate(prompts(9, 60))]
    wanted = [output.token_ids for output in serve(cpu_runner(loaded, kv_bits), requests)]
    runner = gpu_runner(loaded, emulator, kv_bits=kv_bits)
    assert runner.facts.kv_bytes_per_token == loaded.kv_bytes_per_token(mx.float32, kv_bits)
    assert [output.token_ids for output in serve(runner, requests)] == wanted
    assert wanted != [output.token_ids for output in serve(cpu_runner(loaded), requests)] or kv_bits == 8


def window_of(loaded: LoadedModel) -> WindowConfig:
    """A pool that is just large enough; in what ``serve`` is asked here, full length would take more."""
    widest = max(layer.window or 0 for layer in loaded.layers)
    return WindowConfig(widest, num_blocks_needed(widest, BLOCK_SIZE, SLOTS, most_ahead_tokens(24, SLOTS, 2)))


def poison(runner: GpuModelRunner) -> None:
    """NaN at every position of every pool, but for the null block."""
    assert runner._model is not None
    for pool in runner._model.pools:
        for array in pool.arrays():
            by_head = mx.full(array.shape, float("nan"), array.dtype).reshape(pool.shape.num_kv_heads, -1)
            by_head[:, -BLOCK_SIZE * array.shape[1] :] = 0.0
            array[:] = by_head.reshape(array.shape)
        mx.eval(pool.arrays())


@pytest.mark.parametrize("architecture", ["gpt_oss", "gemma3_text"])
def test_windows_with_a_pool_of_their_own_change_no_text(architecture: str, emulator: Emulator) -> None:
    loaded = tiny_model(architecture)
    window = window_of(loaded)
    again = prompts(3, 60)
    requests = [
        (prompt, SamplingParams(temperature=0.0, max_tokens=3 + 4 * i, ignore_eos=True))
        for i, prompt in enumerate([*prompts(9, 60), *again])
    ]
    wanted = [output.token_ids for output in serve(cpu_runner(loaded), requests)]
    runner = gpu_runner(loaded, emulator, num_window_blocks=window.num_blocks)
    poison(runner)
    assert [output.token_ids for output in serve(runner, requests, window=window)] == wanted


def test_chunks_by_the_kernel_read_no_block_that_was_given_back(emulator: Emulator) -> None:
    """Half precision and the same kernels: with window pools every number is the same as without."""
    model, config = build("gemma3_text", vocab_size=224)
    model.set_dtype(mx.float16)
    loaded = describe_model(model, config, ModelSource("half", "folder", Path("nowhere"), "r0"), "cpu")
    tuning = dataclasses.replace(TUNING, pages_chunks=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=9, num_logprobs=2, ignore_eos=True)
    requests = [(prompt, sampling) for prompt in prompts(6, 120)]
    wanted = serve(gpu_runner(loaded, emulator, tuning=tuning), requests)
    window = window_of(loaded)
    runner = gpu_runner(loaded, emulator, tuning=tuning, num_window_blocks=window.num_blocks)
    assert runner._inputs.pages_chunks
    poison(runner)
    assert serve(runner, requests, window=window) == wanted


SAMPLED = [
    SamplingParams(temperature=0.9, max_tokens=6, seed=1),
    SamplingParams(temperature=1.2, top_k=20, max_tokens=6, seed=2),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=6, seed=3),
    SamplingParams(temperature=0.8, top_p=0.9, min_p=0.05, max_tokens=6, seed=3),
    SamplingParams(temperature=0.0, max_tokens=6),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=9, seed=4),
    SamplingParams(temperature=0.0, presence_penalty=1.5, logit_bias=((7, 3.0),), max_tokens=9),
    SamplingParams(temperature=0.7, num_logprobs=3, max_tokens=6, seed=5),
]


@pytest.mark.parametrize("samples_on_device", [True, False], ids=["sampling kernel", "plain sampler"])
def test_sampled_text_is_the_cpu_runners_whoever_else_is_there(samples_on_device: bool, emulator: Emulator) -> None:
    loaded = tiny_model("llama")
    requests = list(zip(prompts(len(SAMPLED), 20), SAMPLED, strict=True))
    wanted = serve(cpu_runner(loaded), requests, slots=1)
    runner = gpu_runner(loaded, emulator, samples_on_device=samples_on_device)
    for ours, theirs in zip(serve(runner, requests), wanted, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert [x.token_id for x in ours.logprobs] == [x.token_id for x in theirs.logprobs]
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [t for t, _ in a.top] == [t for t, _ in b.top]


@pytest.fixture(scope="module")
def half_precision() -> LoadedModel:
    model, config = build("llama", vocab_size=224)
    model.set_dtype(mx.float16)
    return describe_model(model, config, ModelSource("half", "folder", Path("nowhere"), "r0"), "cpu")


@pytest.mark.parametrize("pages_chunks", [True, False], ids=["paged", "gathered"])
def test_guesses_are_verified_as_they_would_be_sampled(
    monkeypatch: pytest.MonkeyPatch, pages_chunks: bool, emulator: Emulator
) -> None:
    loaded = tiny_model("llama")
    settings = ({"temperature": 0.0}, {"temperature": 0.7, "seed": 3, "num_logprobs": 2})
    requests = [
        (prompt, SamplingParams(max_tokens=14, **setting))
        for prompt, setting in zip(prompts(2, 20), settings, strict=True)
    ]
    wanted = serve(cpu_runner(loaded), requests)
    texts = [(*prompt, *output.token_ids) for (prompt, _), output in zip(requests, wanted, strict=True)]

    def guess(_: PromptLookup, token_ids: list[int], max_tokens: int) -> tuple[int, ...]:
        """Right but for every fifth position."""
        text = next(text for text in texts if text[: len(token_ids)] == tuple(token_ids))
        positions = range(len(token_ids), min(len(text), len(token_ids) + max_tokens))
        return tuple(text[position] if position % 5 else 199 - text[position] for position in positions)

    monkeypatch.setattr(PromptLookup, "guess", guess)
    monkeypatch.setattr(DraftCosts, "ratio", lambda *_: 1.0)
    runner = gpu_runner(loaded, emulator, tuning=dataclasses.replace(TUNING, pages_chunks=pages_chunks))
    launched: list[StepBatch] = []
    launch = runner.launch
    monkeypatch.setattr(runner, "launch", lambda batch: (launched.append(batch), launch(batch))[1])
    got = serve(runner, requests, max_draft_tokens=8)
    assert [output.token_ids for output in got] == [output.token_ids for output in wanted]
    assert [len(output.logprobs) for output in got] == [len(output.logprobs) for output in wanted]
    assert sum(len(row.draft_token_ids) for batch in launched for row in batch.rows) > 8


@pytest.mark.parametrize("fused", [True, False], ids=["fused heads and norms", "the model's own"])
def test_chunks_by_the_kernel_and_joined_products(fused: bool, half_precision: LoadedModel, emulator: Emulator) -> None:
    """Half precision: another order of sums may choose another token where two are nearly as likely, nowhere else."""
    sampling = SamplingParams(temperature=0.0, max_tokens=5, num_logprobs=2)
    requests = [(prompt, sampling) for prompt in prompts(9, 60)]
    wanted = serve(cpu_runner(half_precision), requests)
    tuning = dataclasses.replace(
        TUNING, pages_chunks=True, joins_products=True, projects_rows=True, rotates_heads=fused, fuses_norms=fused
    )
    runner = gpu_runner(half_precision, emulator, tuning=tuning)
    assert runner._model is not None
    assert runner._model.products is not None
    runner._model.products.uses.update({1: Use.ALL, 2: Use.ALL, 4: Use.JOINED})
    ours = serve(runner, requests)
    num_compared = 0
    for one, other in zip(ours, wanted, strict=True):
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            num_compared += 1
            assert a.top[0][1] == pytest.approx(b.top[0][1], abs=0.02)
            if a.token_id != b.token_id:
                assert b.top[0][1] - b.top[1][1] < 0.03
                break
    assert num_compared > 30


def test_warm_up_chooses_how_products_are_computed(
    half_precision: LoadedModel, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each size the use whose steps were measured to be the fastest."""
    tuning = dataclasses.replace(TUNING, pages_chunks=True, joins_products=True, projects_rows=True)
    runner = gpu_runner(half_precision, emulator, tuning=tuning)
    assert runner._model is not None
    products = runner._model.products
    assert products is not None
    times_s = {
        (1, 0): {Use.APART: 3.0, Use.JOINED: 2.0, Use.SMALL: 4.0, Use.ALL: 5.0},
        (2, 0): {Use.APART: 3.0, Use.JOINED: 1.99, Use.SMALL: 2.0, Use.ALL: 5.0},  # as fast, and fewer launches
        (4, 0): {Use.APART: 3.0, Use.JOINED: 2.5, Use.SMALL: 2.0, Use.ALL: 1.0},
        (4, 64): {Use.APART: 3.0, Use.JOINED: 4.0},
    }

    def step_time_s(host: HostStep) -> float:
        size = host.shape.num_decode_rows, host.shape.num_chunk_rows
        return times_s[size][products.use_for(*size)]

    monkeypatch.setattr(runner, "_step_time_s", step_time_s)
    runner.warm_up()
    assert products.uses == {1: Use.JOINED, 2: Use.SMALL, 4: Use.ALL}
    assert products.chunk_use is Use.APART
    assert runner.rung_times_s == {1: 2.0, 2: 2.0, 4: 1.0}


def test_mlx_lms_own_generation_does_not_use_the_kernels(half_precision: LoadedModel, emulator: Emulator) -> None:
    tuning = dataclasses.replace(TUNING, joins_products=True, projects_rows=True, rotates_heads=True, fuses_norms=True)
    gpu_runner(half_precision, emulator, tuning=tuning)
    before = emulator.num_launches
    mx.eval(half_precision.model(mx.zeros((3, 1), mx.int32)))
    assert emulator.num_launches == before


def test_a_copied_block_continues_on_its_own(emulator: Emulator) -> None:
    loaded = tiny_model("llama")
    prompt = prompts(1, 60)[0][:13]
    alone = Sequence("a", list(prompt))
    Driver(cpu_runner(loaded), NUM_BLOCKS, BLOCK_SIZE).generate([alone], 1, 3)
    driver = Driver(gpu_runner(loaded, emulator), NUM_BLOCKS, BLOCK_SIZE)
    first = Sequence("a", list(prompt))
    driver.step([(first, 13)])
    fork = Sequence("b", [*prompt, 17], GREEDY, num_prompt_tokens=13, num_computed=13)
    target = driver.free.pop()
    fork.block_ids = [first.block_ids[0], target]
    driver.step([(first, 1), (fork, 1)], (BlockCopy(first.block_ids[1], target),))
    driver.step([(first, 1), (fork, 1)])
    assert first.output == alone.output


def test_a_step_that_raises_leaves_the_chain_whole(emulator: Emulator) -> None:
    loaded = tiny_model("llama")
    runner = gpu_runner(loaded, emulator)
    driver = Driver(runner, NUM_BLOCKS, BLOCK_SIZE)
    sequence, wanted = Sequence("a", list(range(10))), Sequence("a", list(range(10)))
    Driver(cpu_runner(loaded), NUM_BLOCKS, BLOCK_SIZE).generate([wanted], 1, 2)
    driver.step([(sequence, 10)])
    row = driver.row(Sequence("b", []), 1)
    with pytest.raises(Exception):  # noqa: B017, PT011  (whatever a step without a token raises)
        runner.launch(StepBatch(1, (row, row, row, row, row) * 30))
    driver.step([(sequence, 1)])
    assert sequence.output == wanted.output


def test_close_frees_the_pool(emulator: Emulator) -> None:
    loaded = tiny_model("llama")
    before_bytes = mx.get_active_memory()
    runner = gpu_runner(loaded, emulator)
    assert mx.get_active_memory() - before_bytes >= NUM_BLOCKS * BLOCK_SIZE * loaded.facts.kv_bytes_per_token
    runner.close()
    assert mx.get_active_memory() - before_bytes < 1e5
    with pytest.raises(AssertionError, match="closed"):
        runner.launch(StepBatch(0, ()))
