"""The whole engine as it is served: its own process, the demo model, a plan of this machine's memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from engine.config import EngineConfig, load_engine_config
from engine.core.async_engine import AsyncEngine, GenerationRequest
from engine.core.faults import FaultKind, FaultPlan
from engine.core.messages import Progress
from engine.errors import ConfigError, EngineDeadError, MemoryPlanError, ModelNotFoundError, StartupError
from engine.model_source import resolve_model
from engine.request import FinishReason, SamplingParams
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.core_fakes import until

QUESTIONS = (
    "What is the capital of France?",
    "List the planets.",
    "Hello!",
    "Who wrote Hamlet?",
    "Why is the sky blue?",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("demo"))


def settings(**changes: Any) -> EngineConfig:
    # Little headroom: what else runs on the machine that tests is not what is tested.
    memory = {"headroom": "256MiB"}
    return load_engine_config({"slots": 4, "max_model_len": 512, "parity": "off", "memory": memory, **changes})


def chat(tokenizer: Tokenizer, question: str, max_tokens: int, **fields: Any) -> GenerationRequest:
    prompt = tuple(tokenizer.apply_chat_template([{"role": "user", "content": question}]))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(f"{question}-{time.monotonic_ns()}", prompt, sampling, time.monotonic(), **fields)


async def text_of(engine: AsyncEngine, request: GenerationRequest) -> str:
    return "".join([delta.text async for delta in engine.generate(request)])


@pytest.fixture
async def engine(tokenizer: Tokenizer) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine.in_process(settings(), tokenizer)
    await engine.start()
    yield engine
    await engine.close()


async def test_chats_together_answer_as_each_alone(engine: AsyncEngine, tokenizer: Tokenizer) -> None:
    asked = [chat(tokenizer, question, 8 + 2 * i) for i, question in enumerate(QUESTIONS)]
    together = await asyncio.gather(*(text_of(engine, request) for request in asked))
    assert "Paris" in together[0]
    asked = [chat(tokenizer, question, 8 + 2 * i) for i, question in enumerate(QUESTIONS)]
    assert [await text_of(engine, request) for request in asked] == together


async def test_the_model_ends_by_itself_and_at_a_stop_string(engine: AsyncEngine, tokenizer: Tokenizer) -> None:
    deltas = [delta async for delta in engine.generate(chat(tokenizer, QUESTIONS[0], 100))]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_reason is None
    whole = "".join(delta.text for delta in deltas)
    deltas = [delta async for delta in engine.generate(chat(tokenizer, QUESTIONS[0], 100, stop=("Paris",)))]
    assert "".join(delta.text for delta in deltas) == whole[: whole.index("Paris")]
    assert deltas[-1].stop_reason == "Paris"


async def test_an_abort_in_the_middle_is_survived(tokenizer: Tokenizer) -> None:
    engine = AsyncEngine.in_process(settings(slots=1), tokenizer, faults=[[FaultPlan(FaultKind.ABORT, at_step=3)]])
    await engine.start()
    results = await asyncio.gather(
        *(text_of(engine, chat(tokenizer, question, 6)) for question in QUESTIONS[:2]), return_exceptions=True
    )
    assert isinstance(results[0], EngineDeadError)
    assert "SIGABRT" in results[0].message
    assert results[1] == await text_of(engine, chat(tokenizer, QUESTIONS[1], 6))
    assert engine.num_restarts == 1
    await engine.close()


async def test_start_and_end(tokenizer: Tokenizer) -> None:
    heard: list[Progress] = []
    engine = AsyncEngine.in_process(settings(slots="auto"), tokenizer)
    await engine.start(heard.append)
    assert [progress.stage for progress in heard] == ["loading weights", "measuring memory", "making the KV pool"]
    status = engine.status()
    assert status.slots_asked == f"auto:{status.scheduler.slots}"
    assert status.scheduler.slots >= 1
    process = psutil.Process(engine.engine_pid)
    children = set(psutil.Process().children())
    assert process in children
    await until(engine, lambda: engine.status().memory["footprint_bytes"] is not None)
    await engine.close()
    assert not process.is_running()
    assert not engine.healthy


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": "/no/such/model"}, ModelNotFoundError),
        ({"max_model_len": 20_000}, ConfigError),
        ({"memory": {"budget": "100MiB"}}, MemoryPlanError),
    ],
    ids=["no model", "context too long", "no memory"],
)
async def test_refusals_at_start_keep_their_type_and_their_fix(
    tokenizer: Tokenizer, changes: dict[str, Any], error: type[StartupError]
) -> None:
    engine = AsyncEngine.in_process(settings(**changes), tokenizer)
    with pytest.raises(error) as caught:
        await engine.start()
    assert type(caught.value) is error
    assert caught.value.fix
    await engine.close()
