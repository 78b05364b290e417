"""Answers held to a format on a real step: valid themselves, and without a trace in their batch-mates."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.core.async_engine import AsyncEngine, GenerationRequest
from engine.core.engine_core import EngineCore
from engine.errors import InvalidParameterError
from engine.interfaces import ModelRunner
from engine.mlx_backend.gpu_runner import GpuModelRunner
from engine.mlx_backend.kernels.tiling import Tuning
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.model_runner import MlxModelRunner
from engine.request import FinishReason, Grammar, SamplingParams, Thinking
from engine.scheduler import Scheduler, SchedulerConfig
from engine.text.structured import GrammarCompiler
from tests.core_fakes import EOS, letter_tokenizer
from tests.kernel_emulator import COMPILER, Emulator
from tests.mlx.tiny_models import tiny_model

SLOTS, NUM_BLOCKS, BLOCK_SIZE = 4, 128, 16
WORD = {"type": "string", "pattern": "^[a-z]{0,6}$"}
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"w": WORD, "n": {"enum": [1, 2]}}, "additionalProperties": False},
    {"type": "array", "items": {"enum": ["x", None, 3]}, "maxItems": 4},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"anyOf": [{"const": "none"}, WORD]},
]


@cache
def model() -> LoadedModel:
    loaded = tiny_model("llama", vocab_size=257, eos_token_id=EOS)
    return dataclasses.replace(loaded, grammars=GrammarCompiler(letter_tokenizer(), vocab_size=257))


def plain_runner() -> ModelRunner:
    return MlxModelRunner(model(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, slots=SLOTS, max_chunk_tokens=32)


BOTH = pytest.mark.parametrize("engine", ["plain", "kernels"], indirect=True)


@pytest.fixture
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    kernels = getattr(request, "param", "plain") == "kernels"
    if kernels and COMPILER is None:
        pytest.skip("needs a C++ compiler")

    def kernel_runner() -> ModelRunner:
        return GpuModelRunner(
            model(),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            slots=SLOTS,
            max_chunk_tokens=32,
            factory=Emulator(tmp_path),
            tuning=Tuning(simds=2),
            compiles=False,
        )

    engine = AsyncEngine.in_thread(lambda: make_core(kernel_runner if kernels else plain_runner), letter_tokenizer())
    await engine.start()
    yield engine
    await engine.close()


def make_core(make_runner: Callable[[], ModelRunner]) -> EngineCore:
    runner = make_runner()
    config = SchedulerConfig(
        slots=SLOTS,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=512,
        max_chunk_tokens=32,
        max_steps_in_flight=runner.max_steps_in_flight,
        eos_token_ids=(EOS,),
    )
    return EngineCore(Scheduler(config), runner, time.monotonic)


async def answer(engine: AsyncEngine, name: str, **sampling: Any) -> tuple[str, FinishReason | None]:
    settings = SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **sampling})
    prompt = tuple(f"this is what {name} asked".encode())
    text, reason = "", None
    async for delta in engine.generate(GenerationRequest(name, prompt, settings, time.monotonic())):
        text, reason = text + delta.text, delta.finish_reason
    return text, reason


def as_schema(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


async def test_schemas_among_plain_requests_are_valid_and_leave_them_as_they_are(engine: AsyncEngine) -> None:
    names = [f"plain {number}" for number in range(3)]
    alone = [await answer(engine, name, max_tokens=30, ignore_eos=True) for name in names]
    for round_number, schema in enumerate(SCHEMAS):
        asked = {"grammar": as_schema(schema), "temperature": 1.0, "seed": round_number}
        *plain, (first, first_reason), (second, second_reason) = await asyncio.gather(
            *(answer(engine, name, max_tokens=30, ignore_eos=True) for name in names),
            answer(engine, "schema", **asked),
            answer(engine, "another", **asked),
        )
        assert plain == alone
        for text, reason in ((first, first_reason), (second, second_reason)):
            assert reason is FinishReason.STOP
            jsonschema.validate(json.loads(text), schema)


@BOTH
async def test_a_formatted_answer_is_the_same_alone_and_in_company(engine: AsyncEngine) -> None:
    asked = {"grammar": as_schema(SCHEMAS[1]), "temperature": 1.0, "seed": 3}
    alone = await answer(engine, "schema", **asked)
    together = await asyncio.gather(
        answer(engine, "schema", **asked), *(answer(engine, str(i), max_tokens=20) for i in range(3))
    )
    assert together[0] == alone


async def test_logprobs_and_penalties_go_with_a_format(engine: AsyncEngine) -> None:
    text, _ = await answer(
        engine,
        "all",
        grammar=Grammar("regex", "[ab]{8}"),
        presence_penalty=2.0,
        num_logprobs=2,
        logit_bias=((99, 100.0),),
    )
    assert len(text) == 8
    assert set(text) <= set("ab")


@BOTH
async def test_a_budget_ends_the_thinking(engine: AsyncEngine) -> None:
    thinking = Thinking(tuple(b"<t>"), tuple(b"</t>"), is_open=True, budget_tokens=7)
    text, reason = await answer(
        engine, "thinker", thinking=thinking, grammar=Grammar("choice", '["yes"]'), logit_bias=((ord("<"), -100.0),)
    )
    assert text.endswith("</t>yes")
    assert reason is FinishReason.STOP


async def test_a_format_that_cannot_be_followed_ends_its_own_request_only(engine: AsyncEngine) -> None:
    plain = asyncio.create_task(answer(engine, "plain", max_tokens=20, ignore_eos=True))
    with pytest.raises(InvalidParameterError, match="not"):
        await answer(engine, "wrong", grammar=as_schema({"not": {}}))
    assert len((await plain)[0]) > 0
    assert (await answer(engine, "next", grammar=Grammar("choice", '["b"]')))[0] == "b"


async def test_a_format_and_no_end_contradict_each_other(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidParameterError, match="ignore_eos"):
        await answer(engine, "wrong", grammar=Grammar("json_object"), ignore_eos=True)
