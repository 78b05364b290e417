"""For Python tools on the same Ray: ask the replicas directly, with no HTTP in between.

Owns: connecting, and calls that are always cancelled when they are left. Must not know: how a replica answers.

    with connect() as metal:
        print(metal.generate("Say hello.").text)
        with metal.stream("Tell me a story.") as story:
            for piece in story:
                print(piece, end="")

Inside a coroutine: ``await metal.agenerate(...)``, and ``async with metal.stream(...)`` with ``async for``.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import ray
from ray import serve

from engine.request import SamplingParams
from serve_app.config import APP_NAME
from serve_app.errors import ModelUnknownError
from serve_app.protocol import ChatMessage, Deltas, GenerateCall, Prompt, Timings, Usage
from serve_app.routing.stream import ReplicaStream

DEFAULT_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished call: one text and one finish reason for each choice."""

    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    usage: Usage
    timings: Timings

    @property
    def text(self) -> str:
        """The first choice's text."""
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


def connect(address: str = "auto", *, app: str = APP_NAME) -> Client:
    """Return a client of the app on the Ray at ``address``; inside a Ray job or actor, on its own Ray.

    Never starts a Ray. Raises ConnectionError when there is none, and what Serve raises when the app does not run.
    """
    joined = not ray.is_initialized()
    if joined:
        ray.init(address=address, log_to_driver=False)
    ingress: Any = serve.get_app_handle(app)
    deployments: dict[str, str] = ingress.deployments.remote().result(timeout_s=CONNECT_TIMEOUT_S)
    handles = {model: serve.get_deployment_handle(name, app) for model, name in deployments.items()}
    return Client(handles, leave_ray=joined)


class Client:
    """Asks replicas. Safe to use from several threads and tasks."""

    def __init__(self, handles: Mapping[str, Any], *, leave_ray: bool = False) -> None:
        """``handles``: the replicas' Serve handle for each model name."""
        self._handles = handles
        self._leave_ray = leave_ray

    @property
    def models(self) -> tuple[str, ...]:
        """Names and aliases of the served models."""
        return tuple(self._handles)

    def stream(
        self, prompt: Prompt | Sequence[ChatMessage], ask: Ask | None = None, *, raw: bool = False
    ) -> AnswerStream:
        """Return a stream of the first choice's text. Enter it with ``with`` or ``async with``, then iterate it.

        ``prompt``: a conversation, or a text that becomes the user's only message; with ``raw`` the text, or token ids,
        as they are. Raises ModelUnknownError.
        """
        ask = ask or Ask()
        model = ask.model or next(iter(self._handles))
        if model not in self._handles:
            raise ModelUnknownError(model, self.models)
        return AnswerStream(self._handles[model], _call(model, prompt, ask, raw))

    def generate(self, prompt: Prompt | Sequence[ChatMessage], ask: Ask | None = None, *, raw: bool = False) -> Answer:
        """Return the whole answer; arguments as ``stream``."""
        with self.stream(prompt, ask, raw=raw) as pieces:
            for _ in pieces:
                pass
            return pieces.answer

    async def agenerate(
        self, prompt: Prompt | Sequence[ChatMessage], ask: Ask | None = None, *, raw: bool = False
    ) -> Answer:
        """As ``generate``, inside an event loop."""
        async with self.stream(prompt, ask, raw=raw) as pieces:
            async for _ in pieces:
                pass
            return pieces.answer

    def close(self) -> None:
        """Leave the Ray that ``connect`` joined."""
        if self._leave_ray:
            ray.shutdown()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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


def _call(model: str, prompt: Prompt | Sequence[ChatMessage], ask: Ask, raw: bool) -> GenerateCall:
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
    )
