"""The demo model behind the whole way, as an office uses it: many at once, long prompts, rude clients, bad requests."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

from tests.conversations import CONVERSATIONS
from tests.conversations import Endpoint as Counterpart
from tests.serve_endpoint import Endpoint, eventually, eventually_async, user

pytestmark = pytest.mark.timeout(400)

GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}
TOPICS = ["the sea", "bread", "a lighthouse", "winter", "bicycles", "bees", "the moon", "tea"]
NUM_LONG_WORDS = 500  # about 1,500 tokens of the demo model
MAX_CHUNK_TOKENS = 512


async def stream_text(client: openai.AsyncOpenAI, body: dict[str, Any], times_s: list[float] | None = None) -> str:
    """Read a streamed chat to its end and return its text; ``times_s`` gets the arrival of each piece."""
    pieces: list[str] = []
    finish_reasons = []
    async for chunk in await client.chat.completions.create(stream=True, **body):
        for choice in chunk.choices:
            if choice.delta.content:
                pieces.append(choice.delta.content)
                if times_s is not None:
                    times_s.append(time.monotonic())
            finish_reasons += [choice.finish_reason] if choice.finish_reason else []
    assert len(finish_reasons) == 1
    return "".join(pieces)


def test_sixteen_chats_at_once_say_what_each_says_alone(demo: Endpoint) -> None:
    bodies: list[dict[str, Any]] = [
        {
            **GREEDY,
            "messages": user(
                "Tell me " + "and also " * (number % 5) * 4 + f"about {TOPICS[number % 8]}, part {number}."
            ),
            "max_tokens": 6 + number,
        }
        for number in range(16)
    ]

    async def together() -> list[str]:
        async with demo.async_client() as client:
            return await asyncio.gather(*(stream_text(client, body) for body in bodies))

    crowd = asyncio.run(together())
    assert demo.scheduler()["peak_running"] == 4
    client = demo.client()
    alone = [client.chat.completions.create(**body).choices[0].message.content for body in bodies]
    assert crowd == alone
    assert len(set(alone)) > 8, "the questions must have different answers for this to mean anything"
    assert demo.scheduler()["num_running"] == 0


def test_a_long_prompt_does_not_stop_the_streams_that_run(demo: Endpoint) -> None:
    def long_prompt(seed: str) -> dict[str, Any]:
        # Unlike each other from the first word on, so that none finds the other's blocks.
        words = " ".join(f"{seed}{number % 97}" for number in range(NUM_LONG_WORDS))
        return {**GREEDY, "messages": user(words), "max_tokens": 1}

    async def run(newcomer: dict[str, Any] | None) -> tuple[float, int]:
        """The largest gap within three streams, and the newcomer's prompt tokens."""
        async with demo.async_client() as client:
            arrivals: list[list[float]] = [[], [], []]
            bodies = [{**GREEDY, "messages": user(f"Write about {topic}."), "max_tokens": 60} for topic in TOPICS[:3]]
            streams = [asyncio.ensure_future(stream_text(client, b, t)) for b, t in zip(bodies, arrivals, strict=True)]
            await eventually_async(lambda: min(map(len, arrivals)) >= 3)
            num_tokens = 0
            if newcomer is not None:
                answer = await client.chat.completions.create(**newcomer)
                assert answer.usage is not None
                num_tokens = answer.usage.prompt_tokens
            await asyncio.gather(*streams)
        gaps = [later - earlier for times in arrivals for earlier, later in pairwise(times)]
        return max(gaps), num_tokens

    start_s = time.monotonic()
    alone = demo.client().chat.completions.create(**long_prompt("a"))
    assert alone.usage is not None
    chunk_s = (time.monotonic() - start_s) * MAX_CHUNK_TOKENS / alone.usage.prompt_tokens
    usual_s, _ = asyncio.run(run(None))
    disturbed_s, num_tokens = asyncio.run(run(long_prompt("b")))
    assert num_tokens > 1400
    assert disturbed_s < 3 * usual_s + chunk_s


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(demo: Endpoint, stream: bool) -> None:
    before = demo.scheduler()["num_cancelled"]
    body = {**GREEDY, "messages": user("Write a very long story."), "max_tokens": 2000, "stream": stream}

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            asking = asyncio.ensure_future(client.post(f"{demo.url}/v1/chat/completions", json=body))
            await eventually_async(lambda: demo.scheduler()["num_running"] > 0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(leave())
    eventually(lambda: demo.scheduler()["num_running"] == 0)
    after = demo.scheduler()
    assert after["num_cancelled"] == before + 1
    assert after["num_blocks_free"] + after["num_blocks_cached"] == after["num_blocks_total"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"prompt": ""}, "prompt"),
        ("chat/completions", {"messages": user("x"), "top_k": 49_152, "temperature": 1}, "top_k"),
        ("chat/completions", {"messages": user("x"), "stop": [1]}, "stop[0]"),
        ("chat/completions", {"messages": user("x"), "stop": 5}, "stop"),
        ("completions", {"prompt": ["x", 5]}, "prompt"),
        ("chat/completions", {"messages": user("x"), "logit_bias": {"49152": 5}}, "logit_bias"),
        ("chat/completions", {"messages": user("word " * 5000)}, "messages"),
        ("completions", {"prompt": [49_152]}, "prompt"),
    ],
)
def test_requests_that_kill_other_servers_are_refused_and_the_next_one_is_answered(
    demo: Endpoint, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = httpx.post(f"{demo.url}/v1/{path}", json={**GREEDY, "max_tokens": 2, **fields}, timeout=60)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    good = httpx.post(f"{demo.url}/v1/completions", json={**GREEDY, "prompt": "One, two,", "max_tokens": 2}, timeout=60)
    assert good.status_code == 200


def test_a_list_of_prompts_is_answered_like_each_alone(demo: Endpoint) -> None:
    client = demo.client()
    prompts = ["The capital of France is", "Once upon a time", "1, 2, 3,"]
    together = client.completions.create(prompt=prompts, max_tokens=8, **GREEDY)
    alone = [client.completions.create(prompt=prompt, max_tokens=8, **GREEDY).choices[0].text for prompt in prompts]
    assert [choice.text for choice in together.choices] == alone


@pytest.mark.parametrize("text", ["Say exactly: 👩\u200d👩\u200d👧 🇨🇿 你好", "Repeat: naïve café e\u0301"])
def test_streamed_text_is_the_whole_text_and_never_half_a_character(demo: Endpoint, text: str) -> None:
    body = {**GREEDY, "messages": user(text), "max_tokens": 40}

    async def streamed() -> str:
        async with demo.async_client() as client:
            return await stream_text(client, body)

    whole = demo.client().chat.completions.create(**body).choices[0].message.content
    assert asyncio.run(streamed()) == whole


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(demo: Endpoint) -> None:
    client = demo.client()
    body = {**GREEDY, "prompt": "Count: 1, 2, 3, 4, 5,", "max_tokens": 30}
    full = client.completions.create(**body).choices[0].text
    stop = full[6:10]
    stopped = client.completions.create(stop=stop, **body).choices[0]
    assert stopped.text == full[: full.index(stop)]
    assert stopped.finish_reason == "stop"


def test_logprobs_of_greedy_answers_put_the_chosen_token_first(demo: Endpoint) -> None:
    body = {**GREEDY, "messages": user("Hello!"), "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    choice = demo.client().chat.completions.create(**body).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
    text = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content).decode()
    assert text.strip() == (choice.message.content or "").strip()


def test_seeds_make_samples_repeatable_and_several_answers_differ(demo: Endpoint) -> None:
    client = demo.client()
    body: dict[str, Any] = {"model": "demo", "messages": user("Invent a name."), "max_tokens": 12, "seed": 11, "n": 3}
    first, second = (client.chat.completions.create(**body) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1


@pytest.mark.parametrize("client", CONVERSATIONS)
def test_a_client_gets_everything_it_asks_for(demo: Endpoint, client: str) -> None:
    asyncio.run(CONVERSATIONS[client](Counterpart(demo.url, "demo")))  # type: ignore[arg-type]


def test_embeddings_come_beside_answers_and_are_near_where_texts_are(demo: Endpoint) -> None:
    texts = ["The cat sleeps on the sofa.", "A cat is asleep on a couch.", "Interest rates rose by half a percent."]

    async def both() -> tuple[list[list[float]], str, str]:
        async with demo.async_client() as client:
            body = {**GREEDY, "messages": user("Write about bread."), "max_tokens": 20}
            alone = await stream_text(client, body)
            answer = asyncio.ensure_future(stream_text(client, body))
            found = await client.embeddings.create(model="demo", input=texts * 10)
            assert found.usage.prompt_tokens == found.usage.total_tokens > 30 * 5
            return [item.embedding for item in found.data], alone, await answer

    vectors, alone, beside = asyncio.run(both())
    assert beside == alone

    def likeness(a: int, b: int) -> float:
        return sum(x * y for x, y in zip(vectors[a], vectors[b], strict=True))

    assert all(likeness(i, i) == pytest.approx(1, abs=1e-5) for i in range(30))
    # The same text is the same vector, whoever else was in its step.
    assert all(likeness(i, i % 3) > 0.9999 for i in range(30))
    assert likeness(0, 1) > likeness(0, 2)
