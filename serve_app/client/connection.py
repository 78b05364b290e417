"""The client of Python tools: finding the app on a Ray, and everything that can be asked of it.

Owns: which handle a call goes to, and sync beside async. Must not know: what a call is made of.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from serve_app.client.answers import Answer, AnswerStream, Ask, Question, make_call
from serve_app.client.batch import Batch, Progress, patiently
from serve_app.client.embeddings import Floats, embed_call, read_embeddings
from serve_app.config import APP_NAME, ray_environment
from serve_app.errors import ModelUnknownError
from serve_app.protocol import Prompt

CONNECT_TIMEOUT_S = 30.0
# Of one batch, at once: more than a fleet's slots, so that replicas have something waiting, and less than queues take.
MAX_IN_FLIGHT = 64
EMBED_AT_ONCE = 32
MAX_EMBED_CALLS = 16


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
        return AnswerStream(handle, make_call(model, prompt, ask, raw))

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
        _require_several(prompts)
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}: nothing would ever be asked.")
        batch = Batch(prompts, on_progress)

        async def answer(prompt: Question) -> Answer:
            return await patiently(lambda: self.agenerate(prompt, ask, raw=raw), ask)

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
        _require_several(inputs)
        rows: list[Floats] = [np.empty(0, np.float32)] * len(inputs)
        places = asyncio.Semaphore(MAX_EMBED_CALLS)

        async def embed_from(start: int) -> None:
            part = tuple(inputs[start : start + EMBED_AT_ONCE])
            async with places:
                found = await patiently(lambda: read_embeddings(handle, embed_call(model, part, ask, dimensions)), ask)
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


def _require_several(prompts: Iterable[object]) -> None:
    """A text is a sequence of texts too, of its characters, and never meant as one."""
    if isinstance(prompts, str):
        raise TypeError("Several prompts are expected, and one text is given: put it into a list.")
