"""Conversations of several turns over HTTP, open loop: they begin by the clock and not when others have ended."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx

ERRORS = (httpx.HTTPError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Talk:
    """How conversations go. ``begin_per_s``: Poisson; then a turn each ``think_s`` after the last answer."""

    num_talks: int = 24
    num_turns: int = 4
    begin_per_s: float = 1.5
    think_s: float = 1.0
    num_first_bytes: int = 700
    num_more_bytes: int = 150
    max_tokens: int = 12
    num_heads: int = 3
    seed: int = 1


@dataclass(slots=True)
class Turn:
    """One request and what came of it. ``route``: the header that says which replica answered."""

    talk: int
    number: int
    sent_s: float
    status: int = 0
    error: str = ""
    route: str = ""
    ttft_s: float | None = None
    ended_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    text: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer came."""
        return self.status == 200 and not self.error

    @property
    def replica(self) -> str:
        """Which replica answered."""
        return self.route.rpartition("replica=")[2]


@dataclass(slots=True)
class Load:
    """A client that talks to an endpoint, and what it saw."""

    url: str
    model: str = "chain"
    limit_s: float = 60.0
    per_s: float = 4.0
    turns: list[Turn] = field(default_factory=list)

    async def run(self, talk: Talk) -> list[Turn]:
        """Hold all conversations; returns their turns."""
        draw = random.Random(talk.seed)
        limits = httpx.Limits(max_connections=200, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits, timeout=self.limit_s) as client:
            tasks = []
            for number in range(talk.num_talks):
                await asyncio.sleep(draw.expovariate(talk.begin_per_s))
                tasks.append(asyncio.create_task(self._hold(client, talk, number)))
            await asyncio.gather(*tasks)
        return self.turns

    async def ask_during(self, happening: Callable[[], None], *, max_tokens: int) -> None:
        """Ask ``per_s`` questions a second, which may change, until ``happening`` is over; wait for all answers.

        ``happening`` runs in a thread. Every question comes over a connection of its own.
        """
        asking: list[asyncio.Task[Turn]] = []

        async def ask_on(client: httpx.AsyncClient) -> None:
            for number in count():
                while not self.per_s:  # noqa: ASYNC110 - another thread changes it
                    await asyncio.sleep(0.05)
                messages = [{"role": "user", "content": f"question {number} " * 10}]
                asking.append(asyncio.create_task(self.ask(client, messages, number, 0, max_tokens)))
                await asyncio.sleep(1 / self.per_s)

        limits = httpx.Limits(max_connections=500, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits, timeout=self.limit_s) as client:
            asker = asyncio.create_task(ask_on(client))
            try:
                await asyncio.to_thread(happening)
            finally:
                asker.cancel()
            await asyncio.gather(*asking)

    def num_complete(self, since_s: float = 0.0) -> int:
        """Answers that are complete, to questions asked since then."""
        return sum(turn.is_complete for turn in self.turns if turn.sent_s >= since_s)

    async def _hold(self, client: httpx.AsyncClient, talk: Talk, number: int) -> None:
        draw = random.Random(f"{talk.seed}-{number}")
        head = f"You are assistant {number % talk.num_heads}. " * 8
        messages = [{"role": "system", "content": head}, _words(draw, talk.num_first_bytes)]
        for index in range(talk.num_turns):
            turn = await self.ask(client, messages, number, index, talk.max_tokens)
            if not turn.is_complete:
                return
            messages += [{"role": "assistant", "content": turn.text}, _words(draw, talk.num_more_bytes)]
            await asyncio.sleep(talk.think_s * draw.uniform(0.5, 1.5))

    async def ask(
        self, client: httpx.AsyncClient, messages: Sequence[Any], talk: int, number: int, max_tokens: int
    ) -> Turn:
        """Send one streaming request and read its answer to the end."""
        turn = Turn(talk, number, time.monotonic())
        self.turns.append(turn)
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with (
                asyncio.timeout(self.limit_s),
                client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response,
            ):
                turn.status = response.status_code
                turn.route = response.headers.get("x-route", "")
                await _read(response, turn)
        except ERRORS as error:
            turn.error = f"{type(error).__name__}: {error}"
        turn.ended_s = time.monotonic()
        return turn


def hold(url: str, talk: Talk) -> list[Turn]:
    """Hold all conversations at an endpoint; returns their turns. Every answer must be complete."""
    turns = asyncio.run(Load(url).run(talk))
    assert [turn.error for turn in turns if not turn.is_complete] == []
    return turns


def num_computed(turns: Sequence[Turn]) -> int:
    """Prompt tokens that were in no cache."""
    return sum(turn.num_prompt_tokens - turn.num_cached_tokens for turn in turns)


def share_that_returned(turns: Sequence[Turn], block_size: int) -> float:
    """Of the later turns, those that found all of the turn before cached, but for a block that was not full."""
    read = {(turn.talk, turn.number): turn.num_prompt_tokens for turn in turns}
    later = [turn for turn in turns if turn.number]
    found = [turn.num_cached_tokens >= read[turn.talk, turn.number - 1] - block_size for turn in later]
    return sum(found) / len(found)


async def _read(response: httpx.Response, turn: Turn) -> None:
    if turn.status != 200:
        turn.error = (await response.aread()).decode()
        return
    is_done = False
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            is_done = True
        elif line.startswith("data: "):
            _note(json.loads(line[6:]), turn)
    if not is_done and not turn.error:
        turn.error = "the stream ended without an end"


def _note(event: dict[str, Any], turn: Turn) -> None:
    if "error" in event:
        turn.error = event["error"]["code"]
    for choice in event.get("choices", ()):
        if text := choice["delta"].get("content"):
            turn.text += text
            turn.ttft_s = turn.ttft_s if turn.ttft_s is not None else time.monotonic() - turn.sent_s
    if usage := event.get("usage"):
        turn.num_prompt_tokens = usage["prompt_tokens"]
        turn.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]


def _words(draw: random.Random, num_bytes: int) -> dict[str, str]:
    letters = "".join(draw.choices("abcdefghij klmnop", k=num_bytes))
    return {"role": "user", "content": letters}
