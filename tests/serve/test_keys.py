"""Keys on two Macs with an ingress each: what one may do holds for the endpoint, whichever ingress it comes to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fleet_nodes import Fleet
from tests.serve_endpoint import eventually, user

REPLICA = "tests.serve_replicas:ChainReplica"
MODEL = {"name": "chain", "engine": {"slots": 8, "prefix_cache": "per-user"}}
LIMITS: dict[str, list[str]] = {
    "often": ["--requests-per-minute", "6"],
    "many": ["--max-parallel", "2"],
    "much": ["--tokens-per-minute", "40"],
    "patient": ["--priority", "5"],
    "urgent": ["--priority", "-5"],
}
SHORT: dict[str, Any] = {"model": "chain", "messages": user("hello"), "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    nodes = Fleet(2)
    # The proxy of this test's only address would otherwise never leave its own node's ingress.
    nodes.environment["RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING"] = "0"
    with nodes:
        yield nodes


@pytest.fixture(scope="module")
def keys(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The endpoint runs, with keys by name."""
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    found = {}
    for name, limits in LIMITS.items():
        done = fleet.command("keys", "add", name, *limits, "--file", str(file), "--json")
        assert done.returncode == 0, done.stderr
        found[name] = str(json.loads(done.stdout)["key"])
    assert not any(text in Path(file).read_text() for text in found.values())
    ingress, replica = {"replicas": 2}, {"shutdown_grace_s": 1.0}
    fleet.deploy(REPLICA, models=[MODEL], ingress=ingress, replica=replica, keys_file=str(file))
    seen: set[str] = set()

    def both_ingresses_answer() -> bool:
        seen.add(status(fleet, found["patient"])["ingress"])
        return len(seen) == 2

    eventually(both_ingresses_answer)
    return found


def status(fleet: Fleet, key: str) -> dict[str, Any]:
    reply = httpx.get(f"{fleet.url}/status", headers={"authorization": f"Bearer {key}"}, timeout=30)
    found: dict[str, Any] = reply.json()
    return found


def usage(fleet: Fleet, keys: Mapping[str, str], name: str) -> dict[str, int]:
    found: dict[str, int] = status(fleet, keys[name])["keys"][name]
    return found


def client(fleet: Fleet, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key=key, max_retries=0, timeout=60)


async def ask(client: openai.AsyncOpenAI, **more: Any) -> openai.RateLimitError | Any:
    """The answer, or its refusal."""
    try:
        return await client.chat.completions.create(**{**SHORT, **more})
    except openai.RateLimitError as error:
        return error


def split(answers: list[Any]) -> tuple[list[Any], list[openai.RateLimitError]]:
    refusals = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    return [answer for answer in answers if answer not in refusals], refusals


async def test_who_has_no_key_is_not_let_in(fleet: Fleet, keys: Mapping[str, str]) -> None:
    for wrong in ("sk-metalslots-guessed", keys["often"][:-1]):
        async with client(fleet, wrong) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.chat.completions.create(**SHORT)
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()


async def test_requests_a_minute_hold_over_both_ingresses(fleet: Fleet, keys: Mapping[str, str]) -> None:
    async with client(fleet, keys["often"]) as often:
        one_by_one = [await ask(often) for _ in range(4)]
        answers, refusals = split([*one_by_one, *await asyncio.gather(*(ask(often) for _ in range(16)))])
    assert (len(answers), len(refusals)) == (6, 14)
    assert all(1 <= int(refusal.response.headers["retry-after"]) <= 60 for refusal in refusals)
    assert {refusal.code for refusal in refusals} == {"rate_limit_exceeded"}
    tokens = sum(answer.usage.total_tokens for answer in answers)
    expected = {"requests": 6, "tokens": tokens, "refused": 14, "open": 0}
    eventually(lambda: usage(fleet, keys, "often") == expected)


async def test_parallel_requests_hold_over_both_ingresses(fleet: Fleet, keys: Mapping[str, str]) -> None:
    async with client(fleet, keys["many"]) as many:
        answers, refusals = split(await asyncio.gather(*(ask(many, max_tokens=200) for _ in range(10))))
        assert len(answers) >= 2
        assert len(refusals) >= 10 - 2 - 2, "two at a time; some may be done before the last ones arrive"
        await asyncio.to_thread(eventually, lambda: usage(fleet, keys, "many")["open"] == 0)
        # A client that leaves gives its place back.
        stream = await many.chat.completions.create(**{**SHORT, "max_tokens": 400}, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await asyncio.to_thread(eventually, lambda: usage(fleet, keys, "many")["open"] == 0)
        assert not split(await asyncio.gather(ask(many), ask(many)))[1]


async def test_tokens_a_minute_hold_over_both_ingresses(fleet: Fleet, keys: Mapping[str, str]) -> None:
    async with client(fleet, keys["much"]) as much:
        assert not isinstance(await ask(much, max_tokens=40), openai.RateLimitError)
        await asyncio.to_thread(eventually, lambda: usage(fleet, keys, "much")["tokens"] >= 40)
        assert len(split([await ask(much) for _ in range(4)])[1]) == 4


async def test_a_keys_cached_prompt_is_its_own(fleet: Fleet, keys: Mapping[str, str]) -> None:
    secret = {"messages": user("the merger is on Tuesday " * 8)}

    async def cached(name: str) -> int:
        async with client(fleet, keys[name]) as asking:
            found: int = (await ask(asking, **secret)).usage.prompt_tokens_details.cached_tokens
            return found

    assert await cached("patient") == 0
    assert await cached("patient") > 100
    assert await cached("urgent") == 0


async def test_the_urgent_go_first(fleet: Fleet, keys: Mapping[str, str]) -> None:
    done: list[str] = []

    async def answered(asking: openai.AsyncOpenAI, name: str, number: int) -> None:
        await ask(asking, messages=user(f"{name} {number}"), max_tokens=300)
        done.append(name)

    async with client(fleet, keys["patient"]) as patient, client(fleet, keys["urgent"]) as urgent:
        waiting = [asyncio.create_task(answered(patient, "patient", number)) for number in range(24)]
        running = lambda: status(fleet, keys["patient"])["replicas"][0]["engine"]["scheduler"]["num_waiting"]  # noqa: E731
        await asyncio.to_thread(eventually, lambda: running() >= 8)
        await answered(urgent, "urgent", 0)
        await asyncio.gather(*waiting)
    assert done.index("urgent") <= 16, "before the eight that waited for a second turn"
