"""One call of a Python tool: how to answer, the answer, and its text as it comes.

Owns: questions as calls, messages as answers. Must not know: where replicas are.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from engine.request import SamplingParams
from serve_app.protocol import ChatMessage, Deltas, GenerateCall, Prompt, Timings, Usage
from serve_app.routing.stream import ReplicaStream
from serve_app.telemetry.tracing import current_headers

DEFAULT_TIMEOUT_S = 600.0

Question = Prompt | Sequence[ChatMessage]


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished call: one text and one finish reason for each choice. ``error``: of a batch's, that it has failed."""

    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    usage: Usage
    timings: Timings
    error: Exception | None = None

    @property
    def text(self) -> str:
        """The first choice's text. Raises the error of an answer that has failed."""
        if self.error is not None:
            raise self.error
        return self.texts[0]


@dataclass(frozen=True, slots=True)
class Ask:
    """How to answer. ``model`` empty: the first one served. ``session`` names the conversation for the router."""

    model: str = ""
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    n: int = 1
    user: str = ""
    session: str = ""
    timeout_s: float = DEFAULT_TIMEOUT_S


class AnswerStream:
    """Pieces of text as they come; leaving it cancels the call. ``answer`` is there after the last piece."""

    def __init__(self, handle: Any, call: GenerateCall) -> None:
        self._messages = ReplicaStream(handle, call)
        self._texts: list[list[str]] = [[] for _ in range(call.num_choices)]
        self._finish_reasons = [""] * call.num_choices
        self._last: Deltas | None = None

    @property
    def answer(self) -> Answer:
        """The finished answer."""
        last = self._last
        if last is None or last.usage is None:
            raise RuntimeError("The answer is not complete: iterate the stream to its end first.")
        texts = tuple("".join(pieces) for pieces in self._texts)
        return Answer(texts, tuple(self._finish_reasons), last.usage, last.timings or Timings())

    def __enter__(self) -> AnswerStream:
        self._messages.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._messages.close()

    async def __aenter__(self) -> AnswerStream:
        self._messages.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._messages.close()

    def __iter__(self) -> Iterator[str]:
        for message in self._messages:
            if piece := self._take(message):
                yield piece

    async def __aiter__(self) -> AsyncIterator[str]:
        async for message in self._messages:
            if piece := self._take(message):
                yield piece

    def _take(self, message: Deltas) -> str:
        """Keep what the message brings, and return the first choice's part of it."""
        self._last = message
        piece = ""
        for choice in message.choices:
            self._texts[choice.index].append(choice.text)
            self._finish_reasons[choice.index] = choice.finish_reason or ""
            if choice.index == 0:
                piece = choice.text
        return piece


def make_call(model: str, prompt: Question, ask: Ask, raw: bool) -> GenerateCall:
    messages: tuple[ChatMessage, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    if raw:
        prompts = (prompt if isinstance(prompt, str) else tuple(prompt),)  # type: ignore[arg-type]
    elif isinstance(prompt, str):
        messages = ({"role": "user", "content": prompt},)
    else:
        messages = tuple(prompt)  # type: ignore[arg-type]
    return GenerateCall(
        request_id=f"py-{uuid.uuid4().hex}",
        model=model,
        messages=messages,
        prompts=prompts,
        sampling=ask.sampling,
        max_tokens=ask.max_tokens,
        n=ask.n,
        stop=ask.stop,
        user=ask.user,
        session_key=ask.session,
        timeout_s=ask.timeout_s,
        trace_context=current_headers(),
    )
