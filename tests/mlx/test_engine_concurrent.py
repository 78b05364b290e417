"""The asynchronous engine over MLX, a tiny random model in fp32: company changes nothing, leaving frees the slot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from engine.core.async_engine import AsyncEngine, GenerationRequest
from engine.core.engine_core import EngineCore
from engine.mlx_backend.loader import describe_model
from engine.mlx_backend.model_runner import MlxModelRunner
from engine.model_source import ModelSource
from engine.request import SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig
from tests.core_fakes import letter_tokenizer, until
from tests.mlx.tiny_models import build

SLOTS = 4
NUM_CLIENTS = 16
SOURCE = ModelSource("tiny-llama", "folder", Path("nowhere"), "r0")


def build_tiny() -> EngineCore:
    """Everything that touches MLX happens here, on the engine's thread."""
    model, config = build("llama")
    loaded = describe_model(model, config, SOURCE, "cpu")
    runner = MlxModelRunner(loaded, num_blocks=64, block_size=16, slots=SLOTS, max_chunk_tokens=32)
    settings = SchedulerConfig(
        slots=SLOTS,
        num_blocks=64,
        block_size=16,
        max_model_len=loaded.facts.max_model_len,
        max_chunk_tokens=32,
        max_steps_in_flight=runner.max_steps_in_flight,
    )
    return EngineCore(Scheduler(settings), runner, time.monotonic, slots_asked=str(SLOTS))


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine.in_thread(build_tiny, letter_tokenizer())
    await engine.start()
    yield engine
    await engine.close()


def request(client: int, num_tokens: int | None = None, **sampling: float) -> GenerationRequest:
    """Prompts of 3 to 93 tokens, answers of 5 to 35."""
    prompt = tuple((client * 31 + position * 7) % 200 for position in range(3 + 6 * client))
    params = SamplingParams(max_tokens=num_tokens or 5 + 2 * client, temperature=0.0, ignore_eos=True)
    if sampling:
        params = SamplingParams(max_tokens=num_tokens or 5 + 2 * client, ignore_eos=True, **sampling)
    return GenerationRequest(f"client-{client}-{time.monotonic_ns()}", prompt, params, time.monotonic())


async def token_ids(engine: AsyncEngine, asked: GenerationRequest) -> tuple[int, ...]:
    return sum([delta.token_ids async for delta in engine.generate(asked)], ())


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"])
async def test_sixteen_at_once_answer_as_each_alone(engine: AsyncEngine, sampling: dict[str, float]) -> None:
    together = await asyncio.gather(*(token_ids(engine, request(i, **sampling)) for i in range(NUM_CLIENTS)))
    assert engine.status().scheduler.peak_running == SLOTS
    alone = [await token_ids(engine, request(i, **sampling)) for i in range(NUM_CLIENTS)]
    assert together == alone
    assert [len(tokens) for tokens in alone] == [5 + 2 * client for client in range(NUM_CLIENTS)]


async def test_leaving_at_any_moment_frees_everything(engine: AsyncEngine) -> None:
    expected = await token_ids(engine, request(3))

    async def leave_after(client: int) -> None:
        async with aclosing(engine.generate(request(client, num_tokens=200))) as stream:
            for _ in range(client % 5):
                await anext(stream)

    await asyncio.gather(*(leave_after(client) for client in range(NUM_CLIENTS)))
    assert await token_ids(engine, request(3)) == expected
    await until(engine, lambda: engine.status().scheduler.num_running == engine.status().scheduler.num_waiting == 0)
    stats = engine.status().scheduler
    assert stats.num_blocks_free + stats.num_blocks_cached == stats.num_blocks_total
    assert stats.num_output_tokens < NUM_CLIENTS * 30


async def test_answers_to_one_prompt_share_it(engine: AsyncEngine) -> None:
    asked = request(8)
    several = GenerationRequest("several", asked.prompt_token_ids, asked.sampling, time.monotonic(), n=3)
    deltas = [delta async for delta in engine.generate(several)]
    expected = await token_ids(engine, request(8))
    for index in range(3):
        assert sum((delta.token_ids for delta in deltas if delta.index == index), ()) == expected
    assert engine.status().scheduler.num_cached_prompt_tokens > 0
