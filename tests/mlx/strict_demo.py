"""Strict answers of the demo model among plain ones, over HTTP: valid, without a trace in the others, and their cost.

    python -m tests.mlx.strict_demo [--count 200] [--first 0] [--cost-count 40]

First every plain question is asked alone. Then four workers ask for answers after a schema while four others ask the
plain questions again and again. Last, answers of the same lengths are made by four workers with and without their
schemas, in alternating rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema
import openai

from engine.config import load_engine_config
from engine.core.async_engine import AsyncEngine
from engine.model_source import resolve_model
from engine.text.tokenizer import load_tokenizer
from serve_app.ingress.fleet import ServedModel
from serve_app.ingress.http_app import HttpSettings, build_http_app
from serve_app.protocol import Deltas, GenerateCall, ReplicaStatus
from serve_app.replica.calls import CallRunner
from tests.mlx.strict_schemas import make_schemas

NUM_WORKERS = 4
MAX_TOKENS = 160
ROUND = 8
PLAIN: tuple[dict[str, Any], ...] = tuple(
    {"messages": [{"role": "user", "content": question}], "max_tokens": 12 + 2 * number, "temperature": temperature}
    for number, (question, temperature) in enumerate(
        [
            ("What is the capital of France?", 0),
            ("Write a haiku about rain.", 0),
            ("List three uses of a brick.", 0),
            ("Why is the sky blue?", 0),
            ("Tell me about lighthouses.", 0.8),
            ("How do I cook rice?", 0.8),
        ]
    )
)


class LocalFleet:
    """The demo model in this process: everything but Ray."""

    models = (ServedModel("demo", 1_700_000_000),)

    def __init__(self, runner: CallRunner) -> None:
        self._runner = runner

    def open(self, call: GenerateCall) -> AbstractAsyncContextManager[AsyncIterator[Deltas]]:
        return aclosing(self._runner.generate(call))

    async def statuses(self) -> Sequence[ReplicaStatus]:
        return ()


@asynccontextmanager
async def demo_client(**engine_values: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of the demo model with eight slots."""
    config = load_engine_config({"model": "demo", "slots": 2 * NUM_WORKERS, "max_model_len": 1024, **engine_values})
    tokenizer = load_tokenizer(resolve_model("demo"))
    engine = AsyncEngine.in_process(config, tokenizer)
    runner = CallRunner(engine, tokenizer, flush_interval_s=0.03, max_waiting_requests=64)
    await engine.start()
    try:
        app = build_http_app(LocalFleet(runner), HttpSettings(2**20, 300.0, 30.0))
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), timeout=300)
        async with openai.AsyncOpenAI(base_url="http://t/v1", api_key="x", max_retries=0, http_client=http) as client:
            yield client
    finally:
        await engine.close()
        runner.close()


@dataclass
class Outcome:
    """What came of it. ``wrong``: a sentence for everything that must not be."""

    num_strict: int = 0
    num_plain: int = 0
    num_strict_tokens: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Cost:
    """Milliseconds of four workers per token, with and without a schema, by round."""

    strict_ms: list[float]
    free_ms: list[float]

    @property
    def ratio(self) -> float:
        """How much longer a token takes under a schema: the median over the rounds' pairs."""
        return statistics.median(strict / free for strict, free in zip(self.strict_ms, self.free_ms, strict=True))


def strict_request(number: int, schema: dict[str, Any]) -> dict[str, Any]:
    """A seeded request for an answer after ``schema``."""
    fields = ", ".join(schema["properties"])
    return {
        "messages": [{"role": "user", "content": f"Make up record number {number} with the fields {fields}, as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": schema, "strict": True}},
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "seed": number,
    }


async def strict_among_plain(client: openai.AsyncOpenAI, numbers: range) -> Outcome:
    """Ask the strict questions ``numbers``, four at a time, beside four workers with plain ones."""
    outcome, schemas = Outcome(), make_schemas()
    alone = [await _text(client, body) for body in PLAIN]
    left, done = iter(numbers), asyncio.Event()

    async def ask_strictly() -> None:
        for number in left:
            schema = schemas[number % len(schemas)]
            choice, num_tokens = await _answer(client, strict_request(number, schema))
            outcome.num_strict += 1
            outcome.num_strict_tokens += num_tokens
            if problem := _problem(choice, schema):
                outcome.wrong.append(f"strict {number}: {problem}: {choice.message.content!r}")

    async def ask_plainly(first: int) -> None:
        number = first
        while not done.is_set():
            place = number % len(PLAIN)
            text = await _text(client, PLAIN[place])
            number, outcome.num_plain = number + 1, outcome.num_plain + 1
            if text != alone[place]:
                outcome.wrong.append(f"plain {place} changed: {text!r} was {alone[place]!r}")

    plain = [asyncio.create_task(ask_plainly(first)) for first in range(NUM_WORKERS)]
    await asyncio.gather(*(ask_strictly() for _ in range(NUM_WORKERS)))
    done.set()
    await asyncio.gather(*plain)
    return outcome


async def cost_of_strictness(client: openai.AsyncOpenAI, count: int) -> Cost:
    """Time ``count`` strict answers and as many free ones as long, four at a time, in alternating rounds."""
    cost, schemas = Cost([], []), make_schemas()
    for first in range(0, count, ROUND):
        strict = [strict_request(number, schemas[number % len(schemas)]) for number in range(first, first + ROUND)]
        lengths, strict_ms = await _timed(client, strict)
        free = [
            {**body, "response_format": {"type": "text"}, "max_tokens": length, "extra_body": {"ignore_eos": True}}
            for body, length in zip(strict, lengths, strict=True)
        ]
        _, free_ms = await _timed(client, free)
        cost.strict_ms.append(strict_ms)
        cost.free_ms.append(free_ms)
    return cost


async def _timed(client: openai.AsyncOpenAI, bodies: list[dict[str, Any]]) -> tuple[list[int], float]:
    """Each answer's tokens, and milliseconds per token of all."""
    lengths = [0] * len(bodies)

    async def work(mine: Iterator[tuple[int, dict[str, Any]]]) -> None:
        for place, body in mine:
            _, lengths[place] = await _answer(client, body)

    started_s, shared = time.perf_counter(), enumerate(bodies)
    await asyncio.gather(*(work(shared) for _ in range(NUM_WORKERS)))
    return lengths, (time.perf_counter() - started_s) * 1000 / sum(lengths)


async def _answer(client: openai.AsyncOpenAI, body: dict[str, Any]) -> tuple[Any, int]:
    completion = await client.chat.completions.create(model="demo", **body)
    assert completion.usage is not None
    return completion.choices[0], completion.usage.completion_tokens


async def _text(client: openai.AsyncOpenAI, body: dict[str, Any]) -> str:
    choice, _ = await _answer(client, {"seed": 7, **body})
    return str(choice.message.content)


def _problem(choice: Any, schema: dict[str, Any]) -> str:
    if choice.finish_reason != "stop":
        return f"ended with {choice.finish_reason}"
    try:
        jsonschema.validate(json.loads(choice.message.content), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return ""


async def run(numbers: range, cost_count: int) -> bool:
    """Print what was seen; True if nothing was wrong."""
    async with demo_client() as client:
        started_s = time.perf_counter()
        outcome = await strict_among_plain(client, numbers)
        took_s = time.perf_counter() - started_s
        print(
            f"{outcome.num_strict} strict answers over {len(make_schemas())} schemas, {outcome.num_strict_tokens} "
            f"tokens, among {outcome.num_plain} plain ones in {took_s:.0f} s: {len(outcome.wrong)} wrong"
        )
        print(*outcome.wrong, sep="\n")
        if cost_count:
            cost = await cost_of_strictness(client, cost_count)
            strict, free = statistics.median(cost.strict_ms), statistics.median(cost.free_ms)
            print(f"a token of four: {strict:.1f} ms strict, {free:.1f} ms free, ratio {cost.ratio:.2f}")
    return not outcome.wrong


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Strict answers of the demo model among plain ones.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first request, to go on where a run ended")
    parser.add_argument("--cost-count", type=int, default=40)
    asked = parser.parse_args()
    numbers = range(asked.first, asked.first + asked.count)
    raise SystemExit(not asyncio.run(run(numbers, asked.cost_count)))


if __name__ == "__main__":
    main()
