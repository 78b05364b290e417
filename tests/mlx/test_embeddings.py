"""Embeddings beside answers in the same steps, against the model run alone; a checkpoint that is a decoder only."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import openai
import pytest
from mlx.utils import tree_flatten

from engine.build import build_core
from engine.config import load_engine_config
from engine.core.async_engine import AsyncEngine, GenerationRequest
from engine.core.engine_core import EngineCore
from engine.errors import InvalidParameterError, UnsupportedModelError
from engine.interfaces import ModelRunner
from engine.mlx_backend.embeddings import find_embedding_size
from engine.mlx_backend.gpu_runner import GpuModelRunner
from engine.mlx_backend.kernels.tiling import Tuning
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.model_runner import MlxModelRunner
from engine.request import SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig
from serve_app.ingress.fleet import ServedModel
from serve_app.ingress.http_app import HttpSettings, build_http_app
from serve_app.replica.calls import CallRunner
from tests.core_fakes import EOS, letter_tokenizer
from tests.kernel_emulator import COMPILER, Emulator
from tests.mlx.tiny_models import build, tiny_model

SLOTS, NUM_BLOCKS, BLOCK_SIZE = 4, 128, 16
WIDTH = 64
FOX = "the quick brown fox"
TEXTS = ["a", FOX, f"{FOX} jumps over the lazy dog " * 3, "straße 🐎", "the quick brown bird"]
Vector = np.ndarray[Any, Any]


def embedder() -> LoadedModel:
    loaded = tiny_model("qwen3", vocab_size=257, eos_token_id=EOS)
    facts = dataclasses.replace(loaded.facts, embedding_size=find_embedding_size(loaded.model))
    return dataclasses.replace(loaded, facts=facts)


def references(**changes: Any) -> list[Vector]:
    """For each text the last hidden state of the model alone, on this thread: MLX's arrays belong to one."""
    reference, _ = build("qwen3", vocab_size=257, eos_token_id=EOS, **changes)
    return [np.array(reference.model(mx.array([list(text.encode())]))[0, -1]) for text in TEXTS]


def unit(vector: Vector) -> Vector:
    return np.asarray(vector / np.linalg.norm(vector))


def runner_on_kernels(folder: Path) -> ModelRunner:
    return GpuModelRunner(
        embedder(),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        slots=SLOTS,
        max_chunk_tokens=32,
        factory=Emulator(folder),
        tuning=Tuning(simds=2),
        compiles=False,
    )


def plain_runner() -> ModelRunner:
    return MlxModelRunner(embedder(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, slots=SLOTS, max_chunk_tokens=32)


def core(make_runner: Callable[[], ModelRunner]) -> EngineCore:
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


@asynccontextmanager
async def running(make_core: Callable[[], EngineCore]) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine.in_thread(make_core, letter_tokenizer())
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def ask(engine: AsyncEngine, name: str, tokens: list[int], **more: Any) -> tuple[bytes | None, str]:
    settings = SamplingParams(max_tokens=more.pop("max_tokens", 1), temperature=0.0)
    request = GenerationRequest(name, tuple(tokens), settings, time.monotonic(), **more)
    embedding, text = None, ""
    async for delta in engine.generate(request):
        embedding, text = delta.embedding, text + delta.text
    return embedding, text


@pytest.mark.parametrize("where", ["plain", "kernels"])
async def test_an_embedding_is_the_last_state_whatever_else_is_in_the_step(where: str, tmp_path: Path) -> None:
    if where == "kernels" and COMPILER is None:
        pytest.skip("needs a C++ compiler")

    def make_core() -> EngineCore:
        return core(plain_runner if where == "plain" else lambda: runner_on_kernels(tmp_path))

    prompts, vectors = [list(text.encode()) for text in TEXTS], references()
    async with running(make_core) as engine:
        _, alone = await ask(engine, "alone", list(b"hello"), max_tokens=20)
        answers = [asyncio.create_task(ask(engine, f"plain {i}", list(b"hello"), max_tokens=20)) for i in range(2)]
        found = await asyncio.gather(*(ask(engine, f"e{i}", p, embeds=True) for i, p in enumerate(prompts)))
        # Once more, now that the beginnings are cached.
        again = await asyncio.gather(*(ask(engine, f"f{i}", p, embeds=True) for i, p in enumerate(prompts)))
        for (raw, _), vector in zip([*found, *again], vectors * 2, strict=True):
            assert raw is not None
            np.testing.assert_allclose(np.frombuffer(raw, np.float32), vector, atol=2e-4)
        assert [await answer for answer in answers] == [(None, alone)] * 2


async def test_a_model_that_gives_none_refuses() -> None:
    def runner() -> ModelRunner:
        return MlxModelRunner(
            tiny_model("llama", vocab_size=257), num_blocks=16, block_size=16, slots=1, max_chunk_tokens=32
        )

    async with running(lambda: core(runner)) as engine:
        with pytest.raises(InvalidParameterError, match="no embeddings"):
            await ask(engine, "e", [1], embeds=True)


def write_model(folder: Path, pooling: dict[str, bool], *, tied: bool) -> None:
    """An embedding model as its makers publish them: weights of the decoder alone, and how to pool."""
    model, config = build("qwen3", vocab_size=257, eos_token_id=EOS, tie_word_embeddings=tied)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(letter_tokenizer().to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": WIDTH, **pooling}))


class OneEngine:
    """A fleet of one engine in this process."""

    models = (ServedModel("tiny", 1_700_000_000),)

    def __init__(self, runner: CallRunner) -> None:
        self._runner = runner

    def open(self, call: Any) -> Any:
        return aclosing(self._runner.generate(call))

    async def statuses(self) -> tuple[Any, ...]:
        return ()


@asynccontextmanager
async def client_of(folder: Path, **values: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    config = load_engine_config(
        {"model": str(folder), "slots": SLOTS, "backend": "cpu", "memory": {"headroom": 1}, **values}
    )
    async with running(lambda: build_core(config, lambda _progress: None)) as engine:
        runner = CallRunner(engine, letter_tokenizer(), flush_interval_s=0.0, max_waiting_requests=2)
        app = build_http_app(OneEngine(runner), HttpSettings(2**20, 60.0, 30.0))
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        async with openai.AsyncOpenAI(base_url="http://t/v1", api_key="x", max_retries=0, http_client=http) as client:
            yield client
        runner.close()


@pytest.mark.parametrize("tied", [True, False])
async def test_the_official_client_gets_the_vectors_of_a_decoder_alone(tmp_path: Path, tied: bool) -> None:
    write_model(tmp_path, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, tied=tied)
    vectors = [unit(vector) for vector in references(tie_word_embeddings=tied)]
    async with client_of(tmp_path) as client:
        whole = await client.embeddings.create(model="tiny", input=TEXTS)  # asks for base64 and decodes it
        assert [item.index for item in whole.data] == list(range(len(TEXTS)))
        for item, vector in zip(whole.data, vectors, strict=True):
            np.testing.assert_allclose(item.embedding, vector, atol=1e-5)
        assert whole.usage.prompt_tokens == whole.usage.total_tokens == sum(len(text.encode()) for text in TEXTS)
        # Far more inputs than the engine has places; token ids; plain numbers.
        many = await client.embeddings.create(
            model="tiny", input=[list(text.encode()) for text in TEXTS] * 20, encoding_format="float"
        )
        assert len(many.data) == 20 * len(TEXTS)
        for item, vector in zip(many.data, vectors * 20, strict=True):
            np.testing.assert_allclose(item.embedding, vector, atol=1e-5)
        (short,) = (await client.embeddings.create(model="tiny", input="a", dimensions=10)).data
        np.testing.assert_allclose(short.embedding, unit(vectors[0][:10]), atol=1e-5)
        for more, param in (
            ({"input": "a", "dimensions": WIDTH + 1}, "dimensions"),
            ({"input": ""}, "input"),
            ({"input": []}, "input"),
            ({"input": [[99_999]]}, "input"),
            ({"input": "x" * 600}, "input"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.embeddings.create(model="tiny", **more)
            assert caught.value.param == param
        with pytest.raises(openai.BadRequestError, match="writes no text"):
            await client.completions.create(model="tiny", prompt="a")


async def test_any_model_can_be_asked_for_both(tmp_path: Path) -> None:
    write_model(tmp_path, {}, tied=True)
    (tmp_path / "modules.json").unlink()
    async with client_of(tmp_path, embeddings="last-token") as client:
        assert len((await client.embeddings.create(model="tiny", input="a")).data[0].embedding) == WIDTH
        assert (await client.completions.create(model="tiny", prompt="a", max_tokens=2)).choices[0].text != ""
    async with client_of(tmp_path) as client:
        with pytest.raises(openai.BadRequestError, match="no embeddings"):
            await client.embeddings.create(model="tiny", input="a")


def test_other_ways_to_pool_are_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path, {"pooling_mode_mean_tokens": True}, tied=True)
    config = load_engine_config({"model": str(tmp_path), "slots": 1, "backend": "cpu", "parity": "off"})
    with pytest.raises(UnsupportedModelError, match="pools mean_tokens"):
        build_core(config, lambda _progress: None)
