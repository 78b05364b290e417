"""The replicas as the HTTP side sees them: models by name, calls, and what every replica says of itself.

Owns: names and aliases, and the two questions asked of replicas. Must not know: HTTP. ``Fleet`` is the seam: tests and
other data paths stand in for Ray Serve there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.errors import ModelUnknownError
from serve_app.protocol import Deltas, GenerateCall, ReplicaStatus
from serve_app.routing.stream import ReplicaStream

CallStream = AbstractAsyncContextManager[AsyncIterator[Deltas]]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that clients may ask for. ``since_unix_s``: when the ingress began to serve it."""

    name: str
    since_unix_s: int
    aliases: tuple[str, ...] = ()


class Fleet(Protocol):
    """Everything that answers."""

    @property
    def models(self) -> Sequence[ServedModel]:
        """The served models."""
        ...

    def open(self, call: GenerateCall) -> CallStream:
        """Return the call's stream, which is cancelled when it is left."""
        ...

    async def statuses(self) -> Sequence[ReplicaStatus]:
        """Return what every replica that answers in time says of itself."""
        ...


def find_model(fleet: Fleet, name: str) -> ServedModel:
    """Return the model called ``name``. Raises ModelUnknownError with the names that are known."""
    for model in fleet.models:
        if name == model.name or name in model.aliases:
            return model
    raise ModelUnknownError(name, [model.name for model in fleet.models])


class ServeFleet:
    """The fleet behind Ray Serve: one handle for each model."""

    def __init__(self, models: Sequence[ServedModel], handles: Mapping[str, Any], status_timeout_s: float) -> None:
        self._models = tuple(models)
        self._handles = handles
        self._status_timeout_s = status_timeout_s

    @property
    def models(self) -> Sequence[ServedModel]:
        """The served models."""
        return self._models

    def open(self, call: GenerateCall) -> CallStream:
        """Return the call's stream, which is cancelled when it is left."""
        return ReplicaStream(self._handles[call.model], call)

    async def statuses(self) -> Sequence[ReplicaStatus]:
        """Return what every replica that answers in time says of itself."""
        answers = await asyncio.gather(*(self._statuses_of(handle) for handle in self._handles.values()))
        return [status for answer in answers for status in answer]

    async def _statuses_of(self, handle: Any) -> Sequence[ReplicaStatus]:
        # Not routed like a request: it must get through when every place in every queue is taken.
        try:
            async with asyncio.timeout(self._status_timeout_s):
                found = await handle.broadcast("status").results_async(return_exceptions=True)
        except Exception:
            # No replica at all, or one that hangs and spoils the round for all: ask for any that answers.
            return await self._status_of_any(handle)
        return [status for status in found if isinstance(status, ReplicaStatus)]

    async def _status_of_any(self, handle: Any) -> Sequence[ReplicaStatus]:
        response = handle.options(method_name="status").remote()
        try:
            async with asyncio.timeout(self._status_timeout_s):
                return [await response]
        except Exception:
            response.cancel()
            return []
