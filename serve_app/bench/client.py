"""One streaming request to an OpenAI-compatible endpoint, timed without getting in its own way.

Owns: the socket work (`StreamClient`), the raw record of a stream and its reading after the load. Must not know: which
requests are sent when.

While a load runs the client only stamps bytes as they arrive; events are parsed afterwards, because parsing one
stream's JSON would delay the stamps of all others. aiohttp and not httpx: at 2,000 events a second httpx added 2 to
4 ms to the median stamp on a 2-core machine, aiohttp 0.2 to 0.5 ms (`metalslots bench check-client` measures it).
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from serve_app.trust import untrusted

MAX_ERROR_TEXT = 300


@dataclass(slots=True)
class StreamRecord:
    """What arrived for one request: each piece of the body with its time, and how it ended."""

    sent_s: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended_s: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A stream, read. Token counts and ``queue_s`` are what the server says of itself; None = not told."""

    text: str
    chunk_times_s: tuple[float, ...]
    finish_reason: str | None
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_output_tokens: int | None
    queue_s: float | None
    error: str | None


class StreamClient:
    """Posts requests to one endpoint, each over a connection of its own. Use as an async context manager.

    ``trust``: whom it believes over HTTPS; None: whom the system believes.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0, trust: ssl.SSLContext | None = None
    ) -> None:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._url = url
        self._headers = headers
        self._trust = trust
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> StreamClient:
        # limit=0: a connection pool with a bound would queue requests inside the client and call it server time.
        # force_close: a server may close a kept connection just when the next request goes out on it (llama.cpp's did
        # for 10 of 24), which is no failure of the server's; a POST that may have arrived cannot be sent again.
        connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=self._trust or True)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=self._timeout, trust_env=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def stream(self, body: bytes, record: StreamRecord) -> None:
        """Post ``body`` and fill ``record`` as the answer comes, so that a cancelled call leaves what it had.

        Raises nothing for what the endpoint does; cancellation passes through.
        """
        if self._session is None:
            raise RuntimeError("StreamClient is used outside its context")
        record.sent_s = time.monotonic()
        try:
            async with self._session.post(self._url, data=body) as response:
                if response.status != 200:
                    record.error = f"HTTP {response.status}: {(await response.text())[:MAX_ERROR_TEXT]}"
                else:
                    async for piece in response.content.iter_any():
                        record.pieces.append((time.monotonic(), piece))
        except TimeoutError:
            record.error = f"no end of the answer after {self._timeout.total:.0f} s"
        except (aiohttp.ClientError, OSError) as error:
            record.error = str(untrusted(self._url, error) or f"{type(error).__name__}: {error}")[:MAX_ERROR_TEXT]
        except asyncio.CancelledError:
            record.error = "cut off by the time limit of the load"
            raise
        finally:
            record.ended_s = time.monotonic()


async def get_json(
    url: str, *, api_key: str | None = None, timeout_s: float = 5.0, trust: ssl.SSLContext | None = None
) -> Any:
    """GET a JSON document, or None when there is none at ``url``. Raises UntrustedError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            session.get(url, headers=headers, ssl=trust or True) as response,
        ):
            return await response.json(content_type=None) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        if (refusal := untrusted(url, error)) is not None:
            raise refusal from error
        return None


def read_answer(record: StreamRecord) -> Answer:
    """Read a recorded stream. A chunk counts from the moment its last byte arrived."""
    reader = _Reader()
    error = record.error
    try:
        for arrived_s, line in read_lines(record.pieces):
            reader.read_line(arrived_s, line)
    except (ValueError, TypeError, AttributeError, KeyError) as parse_error:
        error = error or f"unreadable event: {type(parse_error).__name__}: {parse_error}"[:MAX_ERROR_TEXT]
    return reader.answer(error)


def read_lines(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Cut a recorded body into lines, each with the time at which its last byte arrived."""
    rest = b""
    for arrived_s, piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield arrived_s, line.rstrip(b"\r")


class _Reader:
    """Gathers an answer from its server-sent events, one line at a time."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._times_s: list[float] = []
        self._finish_reason: str | None = None
        self._usage: Mapping[str, Any] = {}
        self._timings: Mapping[str, Any] = {}
        self._error: str | None = None
        self._done = False

    def read_line(self, arrived_s: float, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            self._done = True
            return
        event = json.loads(data)
        if event.get("error"):
            self._error = f"error event: {event['error']}"[:MAX_ERROR_TEXT]
        self._usage = event.get("usage") or self._usage
        self._timings = event.get("timings") or self._timings
        for choice in event.get("choices") or ():
            piece = _text_of(choice)
            if piece:
                self._text.append(piece)
                self._times_s.append(arrived_s)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def answer(self, error: str | None) -> Answer:
        error = error or self._error
        if error is None and not self._done:
            error = "the stream ended without [DONE]"
        if error is None and not self._times_s:
            error = "the answer holds no text"
        details = self._usage.get("prompt_tokens_details") or {}
        return Answer(
            text="".join(self._text),
            chunk_times_s=tuple(self._times_s),
            finish_reason=self._finish_reason,
            num_prompt_tokens=self._usage.get("prompt_tokens"),
            num_cached_tokens=details.get("cached_tokens"),
            num_output_tokens=self._usage.get("completion_tokens"),
            queue_s=self._timings.get("prefill_started_s", self._timings.get("queued_s")),
            error=error,
        )


def _text_of(choice: Mapping[str, Any]) -> str:
    if choice.get("text") is not None:
        return str(choice["text"])
    delta = choice.get("delta") or {}
    # Both spellings of a reasoning model's hidden text are in use; a token is a token wherever it is shown.
    return "".join(delta.get(key) or "" for key in ("reasoning_content", "reasoning", "content"))
