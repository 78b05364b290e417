"""For Python tools on the same Ray: ask the replicas directly, with no HTTP in between.

Owns: connecting, calls that are always cancelled when they are left, and batches of calls. Must not know: how a replica
answers. Works in a script on a machine of the fleet, in a Ray job, and in a Ray actor.

    with connect() as metal:
        print(metal.generate("Say hello.").text)
        with metal.stream("Tell me a story.") as story:
            for piece in story:
                print(piece, end="")

        answers = metal.generate_many(prompts, on_progress=print)
        vectors = metal.embed(["a text", "another"])

Inside a coroutine: ``await`` the same with an ``a`` in front (``agenerate``), and ``async with metal.stream(...)`` with
``async for``.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.request import SamplingParams
from serve_app.config import APP_NAME, ray_environment
from serve_app.errors import ModelUnknownError, answer_for
from serve_app.protocol import ChatMessage, Deltas, GenerateCall, Prompt, Timings, Usage
from serve_app.routing.stream import ReplicaStream
from serve_app.telemetry.tracing import current_headers

DEFAULT_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 30.0
# Of one batch, at once: more than a fleet's slots, so that replicas have something waiting, and less than queues take.
MAX_IN_FLIGHT = 64
QUEUE_FULL = "queue_full"
MAX_PAUSE_S = 10.0
EMBED_AT_ONCE = 32
MAX_EMBED_CALLS = 16

Floats = NDArray[np.float32]
T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch is. ``num_total`` None: its prompts come from an iterator."""

    num_done: int
    num_failed: int
    num_total: int | None
    num_output_tokens: int


Question = Prompt | Sequence[ChatMessage]


def connect(address: str = "auto", *, app: str = APP_NAME, token_file: Path | None = None) -> Client:
    """Return a client of the app on the Ray at ``address``; inside a Ray job or actor, on its own Ray.

    ``token_file``: the fleet's secret, where Ray does not find it by itself. Never starts a Ray. Raises ConnectionError
    when there is none, and what Serve raises when the app does not run.
    """
    if "ray" not in sys.modules:
        # Read when Ray is first imported. A program that has imported it before still works, at twice the cost.
        os.environ.update({name: os.environ.get(name, value) for name, value in ray_environment().items()})
    if token_file is not None:
        os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)})
    import ray
    from ray import serve

    joined = not ray.is_initialized()
    if joined:
        ray.init(address=address, log_to_driver=False)
    ingress: Any = serve.get_app_handle(app)
    deployments: dict[str, str] = ingress.deployments.remote().result(timeout_s=CONNECT_TIMEOUT_S)
    handles = {model: serve.get_deployment_handle(name, app) for model, name in deployments.items()}
    return Client(handles, leave=ray.shutdown if joined else None)


class Client:
    """Asks replicas. Safe to use from several threads and tasks."""

    def __init__(self, handles: Mapping[str, Any], *, leave: Callable[[], Any] | None = None) -> None:
        """``handles``: the replicas' Serve handle for each model name. ``leave`` is called by ``close``."""
        self._handles = handles
        self._leave = leave

    @property
    def models(self) -> tuple[str, ...]:
        """Names and aliases of the served models."""
        return tuple(self._handles)

    def stream(self, prompt: Question, ask: Ask | None = None, *, raw: bool = False) -> AnswerStream:
        """Return a stream of the first choice's text. Enter it with ``with`` or ``async with``, then iterate it.

        ``prompt``: a conversation, or a text that becomes the user's only message; with ``raw`` the text, or token ids,
        as they are. Raises ModelUnknownError.
        """
        ask = ask or Ask()
        model, handle = self._handle(ask.model)
        return AnswerStream(handle, _call(model, prompt, ask, raw))

    def generate(self, prompt: Question, ask: Ask | None = None, *, raw: bool = False) -> Answer:
        """Return the whole answer; arguments as ``stream``."""
        with self.stream(prompt, ask, raw=raw) as pieces:
            for _ in pieces:
                pass
            return pieces.answer

    async def agenerate(self, prompt: Question, ask: Ask | None = None, *, raw: bool = False) -> Answer:
        """As ``generate``, inside an event loop."""
        async with self.stream(prompt, ask, raw=raw) as pieces:
            async for _ in pieces:
                pass
            return pieces.answer

    def generate_many(self, prompts: Iterable[Question], ask: Ask | None = None, **options: Any) -> list[Answer]:
        """As ``agenerate_many``, outside an event loop."""
        return asyncio.run(self.agenerate_many(prompts, ask, **options))

    async def agenerate_many(
        self,
        prompts: Iterable[Question],
        ask: Ask | None = None,
        *,
        raw: bool = False,
        max_in_flight: int = MAX_IN_FLIGHT,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[Answer]:
        """Return the answers to ``prompts``, in their order; ``max_in_flight`` of them are asked at once.

        A question that a full queue refuses is asked again after the predicted wait, within ``ask.timeout_s``. Any
        other error stands in its answer and stops nothing. Leaving it (a cancelled task, Ctrl-C) cancels all that runs.
        """
        ask = ask or Ask()
        self._handle(ask.model)
        batch = _Batch(prompts, on_progress)

        async def answer(prompt: Question) -> Answer:
            return await _patiently(lambda: self.agenerate(prompt, ask, raw=raw), ask)

        async with asyncio.TaskGroup() as group:
            for _ in range(max_in_flight):
                group.create_task(batch.work(answer))
        return batch.answers()

    def _handle(self, model: str) -> tuple[str, Any]:
        model = model or next(iter(self._handles))
        if model not in self._handles:
            raise ModelUnknownError(model, self.models)
        return model, self._handles[model]

    def embed(self, inputs: Sequence[Prompt], ask: Ask | None = None, *, dimensions: int | None = None) -> Floats:
        """As ``aembed``, outside an event loop."""
        return asyncio.run(self.aembed(inputs, ask, dimensions=dimensions))

    async def aembed(
        self, inputs: Sequence[Prompt], ask: Ask | None = None, *, dimensions: int | None = None
    ) -> Floats:
        """Return the embeddings of texts or token ids, one row of length 1 for each, cut to ``dimensions`` numbers.

        Thousands go in calls of ``EMBED_AT_ONCE``, spread over the machines. The first error is raised, and what runs
        is cancelled. Raises UnsupportedParameterError when the model gives no embeddings.
        """
        ask = ask or Ask()
        model, handle = self._handle(ask.model)
        rows: list[Floats] = [np.empty(0, np.float32)] * len(inputs)
        places = asyncio.Semaphore(MAX_EMBED_CALLS)

        async def embed_from(start: int) -> None:
            part = tuple(inputs[start : start + EMBED_AT_ONCE])
            async with places:
                found = await _patiently(lambda: _embeddings(handle, _embed_call(model, part, ask, dimensions)), ask)
            rows[start : start + EMBED_AT_ONCE] = found

        try:
            async with asyncio.TaskGroup() as group:
                for start in range(0, len(inputs), EMBED_AT_ONCE):
                    group.create_task(embed_from(start))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return np.stack(rows) if rows else np.empty((0, dimensions or 0), np.float32)

    def close(self) -> None:
        """Leave the Ray that ``connect`` joined."""
        if self._leave is not None:
            self._leave()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _patiently(act: Callable[[], Awaitable[T]], ask: Ask) -> T:
    """Do ``act`` again while a full queue refuses it, after the predicted wait and within ``ask.timeout_s``."""
    deadline_s = time.monotonic() + ask.timeout_s
    while True:
        try:
            return await act()
        except Exception as error:
            pause_s = min(getattr(error, "retry_after_s", None) or 1.0, MAX_PAUSE_S) * random.uniform(0.5, 1.5)
            if answer_for(error).code != QUEUE_FULL or time.monotonic() + pause_s > deadline_s:
                raise
        await asyncio.sleep(pause_s)


async def _embeddings(handle: Any, call: GenerateCall) -> list[Floats]:
    found: list[Floats] = [np.empty(0, np.float32)] * call.num_prompts
    async with ReplicaStream(handle, call) as messages:
        async for message in messages:
            for choice in message.choices:
                found[choice.index] = np.frombuffer(choice.embedding, "<f4")
    return found


class _Batch:
    """Prompts that are taken one by one by workers of one event loop, and the answer to each."""

    def __init__(self, prompts: Iterable[Question], on_progress: Callable[[Progress], None] | None) -> None:
        self._num_total = len(prompts) if isinstance(prompts, Sequence) else None
        self._prompts = enumerate(prompts)
        self._on_progress = on_progress
        self._answers: dict[int, Answer] = {}
        self._num_failed = 0
        self._num_output_tokens = 0

    async def work(self, ask: Callable[[Question], Awaitable[Answer]]) -> None:
        """Answer prompts until there are none left."""
        for number, prompt in self._prompts:
            try:
                answer = await ask(prompt)
            except Exception as error:
                answer = Answer((), (), Usage(), Timings(), error)
            self._answers[number] = answer
            self._num_failed += answer.error is not None
            self._num_output_tokens += answer.usage.num_output_tokens
            if self._on_progress is not None:
                num_done = len(self._answers)
                self._on_progress(Progress(num_done, self._num_failed, self._num_total, self._num_output_tokens))

    def answers(self) -> list[Answer]:
        """All of them, in the prompts' order."""
        return [self._answers[number] for number in sorted(self._answers)]


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


def _call(model: str, prompt: Question, ask: Ask, raw: bool) -> GenerateCall:
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


def _embed_call(model: str, inputs: tuple[Prompt, ...], ask: Ask, dimensions: int | None) -> GenerateCall:
    return GenerateCall(
        request_id=f"py-{uuid.uuid4().hex}",
        model=model,
        prompts=inputs,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        max_tokens=1,
        user=ask.user,
        session_key=ask.session,
        timeout_s=ask.timeout_s,
        embeds=True,
        dimensions=dimensions,
    )
