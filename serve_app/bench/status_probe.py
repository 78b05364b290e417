"""Watches what the endpoint itself says of its slots while a load runs.

Owns: sampling `/status` and reading slots from it. Must not know: what the load is. An endpoint without a status
document is not an error: nothing is known of its slots then.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from serve_app.bench.client import get_json

PERIOD_S = 0.5
ANSWER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class SlotSample:
    """The fleet's slots at one moment, in seconds since the load started."""

    at_s: float
    num_slots: int
    num_running: int
    num_waiting: int


@asynccontextmanager
async def watching(
    base_url: str, api_key: str | None, trust: ssl.SSLContext | None = None
) -> AsyncIterator[list[SlotSample]]:
    """Sample while the context is open; the list grows as samples come."""
    samples: list[SlotSample] = []
    task = asyncio.create_task(_sample(base_url, api_key, trust, samples))
    try:
        yield samples
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _sample(base_url: str, api_key: str | None, trust: ssl.SSLContext | None, samples: list[SlotSample]) -> None:
    started_s = time.monotonic()
    while True:
        asked_s = time.monotonic()
        document = await get_json(f"{base_url}/status", api_key=api_key, timeout_s=ANSWER_TIMEOUT_S, trust=trust)
        sample = read_slots(document, asked_s - started_s)
        if sample is None and not samples:
            return  # it has no status: asking on would only load it
        if sample is not None:
            samples.append(sample)
        await asyncio.sleep(PERIOD_S)


def read_slots(document: Any, at_s: float) -> SlotSample | None:
    """Add up the schedulers found anywhere in a status document; None when there are none."""
    schedulers = list(_schedulers(document))
    if not schedulers:
        return None
    slots, running, waiting = (
        sum(int(each.get(key) or 0) for each in schedulers) for key in ("slots", "num_running", "num_waiting")
    )
    return SlotSample(at_s, slots, running, waiting)


def _schedulers(node: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(node, Mapping):
        if isinstance(node.get("slots"), int) and "num_running" in node:
            yield node
        else:
            for child in node.values():
                yield from _schedulers(child)
    elif isinstance(node, list):
        for child in node:
            yield from _schedulers(child)
