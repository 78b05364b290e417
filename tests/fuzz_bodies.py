"""Bodies that no client should send, at every address that generates, and what must be true after each of them.

    python -m tests.fuzz_bodies --count 10000 [--seed 0] [--url http://127.0.0.1:8000 --model demo --parallel 4]

Without an address they go to an application over the chain model in this process: everything but Ray and MLX.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from serve_app.ingress.anthropic_types import MessagesRequest
from serve_app.ingress.embeddings import EmbeddingsRequest
from serve_app.ingress.openai_types import ChatCompletionRequest, CompletionRequest
from serve_app.ingress.responses_types import ResponsesRequest

MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "chain", "messages": MESSAGES, "max_tokens": 2, "tools": [TOOL]},
    "/v1/completions": {"model": "chain", "prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"model": "chain", "input": [{"role": "user", "content": "hello"}], "max_output_tokens": 2},
    "/v1/messages": {"model": "chain", "messages": MESSAGES, "max_tokens": 2},
}
EMBEDDINGS = "/v1/embeddings"
# Answered with 400 by a model that gives none, so it is no good request.
BODIES = GOOD | {EMBEDDINGS: {"model": "chain", "input": ["hello", [1, 2]]}}
FIELDS = {
    EMBEDDINGS: EmbeddingsRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 1e308, 0.5, "", "x", "\x00", "\ud800", "é" * 50, [], [[]],
    {}, {"": {}}, [None], ["a", 1], {"type": "text"}, {"type": "function"}, {"type": "json_schema"}, [{"role": "tool"}],
    [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"$ref": "#/nowhere"}}}],
    {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "#"}}}, {"regex": "(" * 50},
    {"regex": "(a{1000}){1000}"}, {"choice": ["a"] * 1000}, {"grammar": "start: start"},
]  # fmt: skip
LARGE_EVERY = 500
GOOD_EVERY = 50
Send = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]


@dataclass
class Findings:
    """What was seen: how many of each status, and everything that must not be."""

    statuses: dict[int, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def make_body(draw: random.Random) -> tuple[str, bytes]:
    """An address and a body for it."""
    path = draw.choice(list(BODIES))
    body = json.loads(json.dumps(BODIES[path]))
    if draw.randrange(LARGE_EVERY) == 0:
        return path, b'{"model": "' + b"x" * 20_000_000 + b'"}'
    kind = draw.randrange(8)
    if kind < 4:
        names = [*FIELDS[path].model_fields, "nonsense"]
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            body[draw.choice(names)] = _strange(draw)
        # An answer of unlimited length would only measure patience.
        if not isinstance(body.get("max_tokens"), int) and path not in ("/v1/responses", EMBEDDINGS):
            body["max_tokens"] = 2
        return path, _dump(body)
    raw = _dump(body)
    match kind:
        case 4:
            return path, raw[: draw.randrange(len(raw))]
        case 5:
            place = draw.randrange(len(raw))
            return path, raw[:place] + bytes(draw.randrange(256) for _ in range(draw.randint(1, 4))) + raw[place + 1 :]
        case 6:
            depth = draw.choice((10, 100, 5_000, 100_000))
            opening, closing = draw.choice(((b"[", b"]"), (b'{"a":', b"}")))
            return path, opening * depth + (b"1" if opening != b"[" else b"") + closing * depth
        case _:
            number = draw.choice((b"9" * 5_000, b"1e999", b"-Infinity", b"NaN", b"0x1", b"1" + b"0" * 400 + b".5"))
            return path, raw.replace(b": 2", b": " + number, 1)


def _strange(draw: random.Random) -> Any:
    value = draw.choice(STRANGE)
    for _ in range(draw.choice((0, 0, 0, 1, 2))):
        value = draw.choice(([value], {"type": value}, {draw.choice("ab"): value, "role": "user", "content": value}))
    return value


def _dump(body: Any) -> bytes:
    return json.dumps(body).encode()


async def fuzz(send: Send, count: int, seed: int, findings: Findings, patience_s: float) -> None:
    """Send ``count`` bodies, and a good request after every ``GOOD_EVERY``."""
    draw = random.Random(seed)
    for number in range(count):
        path, body = make_body(draw)
        try:
            status, answer = await asyncio.wait_for(send(path, body), patience_s)
        except TimeoutError:
            findings.wrong.append(f"{number}: {path} hangs: {body[:300]!r}")
            continue
        findings.statuses[status] = findings.statuses.get(status, 0) + 1
        if problem := _problem(path, status, answer):
            findings.wrong.append(f"{number}: {path} {problem}: {body[:300]!r}")
        if number % GOOD_EVERY == 0 or len(body) > 10**6:
            good = draw.choice(list(GOOD))
            status, answer = await asyncio.wait_for(send(good, _dump(GOOD[good])), patience_s)
            if status != 200:
                findings.wrong.append(f"{number}: a good request to {good} got {status}: {answer[:200]!r}")


def _problem(path: str, status: int, answer: bytes) -> str:
    if status == 200:
        return ""
    if not 400 <= status < 500:
        return f"answers {status} {answer[:200]!r}"
    error = json.loads(answer)["error"]
    expected = {"type", "message"} if path == "/v1/messages" else {"message", "type", "param", "code"}
    return "" if set(error) == expected and error["message"] else f"has no error object: {answer[:200]!r}"


async def run(count: int, seed: int) -> Findings:
    """Fuzz a server in this process."""
    from tests.serve_fakes import EngineFleet, client_of

    findings = Findings()

    async with EngineFleet() as fleet:
        client = client_of(fleet, max_body_bytes=2**20)

        async def send(path: str, body: bytes) -> tuple[int, bytes]:
            reply = await client.post(path, body)
            return reply.status, reply.body

        await fuzz(send, count, seed, findings, patience_s=30.0)
    return findings


async def run_at(url: str, model: str, count: int, seed: int, parallel: int, patience_s: float) -> Findings:
    """Fuzz the server at ``url``, whose model is called ``model``, ``parallel`` bodies at a time."""
    findings = Findings()
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http:

        async def send(path: str, body: bytes) -> tuple[int, bytes]:
            return await _post(http, path, body.replace(b'"chain"', json.dumps(model).encode(), 1))

        await asyncio.gather(
            *(fuzz(send, count // parallel, seed + worker, findings, patience_s) for worker in range(parallel))
        )
    return findings


async def _post(http: httpx.AsyncClient, path: str, body: bytes) -> tuple[int, bytes]:
    reply = await http.post(path, content=body, headers={"content-type": "application/json"})
    return reply.status_code, reply.content


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Send bodies that no client should send.")
    parser.add_argument("--url")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo", help="name of the model at --url")
    parser.add_argument("--parallel", type=int, default=1, help="bodies at a time, at --url")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds after which an answer is missing")
    asked = parser.parse_args()
    if asked.url is None:
        findings = asyncio.run(run(asked.count, asked.seed))
    else:
        at = run_at(asked.url, asked.model, asked.count, asked.seed, asked.parallel, asked.patience)
        findings = asyncio.run(at)
    print(f"{asked.count} bodies: {dict(sorted(findings.statuses.items()))}")
    for line in findings.wrong:
        print(line)
    raise SystemExit(bool(findings.wrong))


if __name__ == "__main__":
    main()
