"""A running app as the tests of the serve tier see it, and waiting for what happens in it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import openai

POLL_S = 0.02
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Endpoint:
    """A running app with one replica."""

    url: str

    def client(self) -> openai.OpenAI:
        """The official client with only its address changed. It does not retry, so that every failure is seen."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=300)

    def async_client(self) -> openai.AsyncOpenAI:
        """The same for coroutines."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=300)

    def status(self) -> dict[str, Any]:
        """The replica's part of /status."""
        (replica,) = httpx.get(f"{self.url}/status", timeout=30).json()["replicas"]
        found: dict[str, Any] = replica
        return found

    def scheduler(self) -> dict[str, Any]:
        """The scheduler's figures."""
        found: dict[str, Any] = self.status()["engine"]["scheduler"]
        return found


def user(text: str) -> list[Any]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until ``condition``, about something in another process, holds."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        threading.Event().wait(POLL_S)


async def eventually_async(condition: Callable[[], bool]) -> None:
    """The same for coroutines; the condition is asked in a thread."""
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(POLL_S)
