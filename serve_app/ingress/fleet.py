"""The replicas as the HTTP side sees them: models by name, calls, and what every replica says of itself.

Owns: names and aliases, and the two questions asked of replicas. Must not know: HTTP. ``Fleet`` is the seam: tests and
other data paths stand in for Ray Serve there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from serve_app.autoscaling import journal
from serve_app.autoscaling.journal import ScalingHistory
from serve_app.errors import ModelUnknownError
from serve_app.protocol import Deltas, GenerateCall, ReplicaStatus
from serve_app.routing.stream import ReplicaStream
from serve_app.telemetry.families import Family
from serve_app.telemetry.observer import ReplicaFamilies, ReplicaView

T = TypeVar("T")

CallStream = AbstractAsyncContextManager[AsyncIterator[Deltas]]


@dataclass(frozen=True, slots=True)
class IngressFamilies:
    """What one ingress shows to Prometheus. ``host``: its machine's name, ``node_id``: Ray's."""

    host: str
    node_id: str
    families: tuple[Family, ...]


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

    async def views(self) -> Sequence[ReplicaView]:
        """Return what they show of themselves to people."""
        ...

    async def families(self) -> Sequence[ReplicaFamilies]:
        """Return what they show to Prometheus."""
        ...

    async def ingress_families(self) -> Sequence[IngressFamilies]:
        """Return what all ingresses show to Prometheus; none where each answers for itself."""
        ...

    async def scaling(self) -> Mapping[str, ScalingHistory]:
        """Return the decisions on how many replicas there should be, by model; none where nobody decides."""
        ...


def find_model(fleet: Fleet, name: str) -> ServedModel:
    """Return the model called ``name``. Raises ModelUnknownError with the names that are known."""
    for model in fleet.models:
        if name == model.name or name in model.aliases:
            return model
    raise ModelUnknownError(name, [model.name for model in fleet.models])


class ServeFleet:
    """The fleet behind Ray Serve: one handle for each model."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        handles: Mapping[str, Any],
        status_timeout_s: float,
        peers: Callable[[], Any] | None = None,
        scaled: Mapping[str, str] | None = None,
    ) -> None:
        """``peers`` returns the handle of all ingresses. ``scaled``: deployments by model, where load says how many."""
        self._peers = peers
        self._scaled = scaled or {}
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
        return await self._ask_all("status", ReplicaStatus)

    async def views(self) -> Sequence[ReplicaView]:
        """Return what they show of themselves to people."""
        return await self._ask_all("view", ReplicaView)

    async def families(self) -> Sequence[ReplicaFamilies]:
        """Return what they show to Prometheus."""
        return await self._ask_all("metrics", ReplicaFamilies)

    async def ingress_families(self) -> Sequence[IngressFamilies]:
        """Return what all ingresses show to Prometheus; none where each answers for itself."""
        return [] if self._peers is None else await self._ask(self._peers(), "families", IngressFamilies)

    async def scaling(self) -> Mapping[str, ScalingHistory]:
        """Return the decisions on how many replicas there should be, by model."""
        read = {model: asyncio.to_thread(journal.read, name) for model, name in self._scaled.items()}
        return dict(zip(read, await asyncio.gather(*read.values()), strict=True))

    async def _ask_all(self, method: str, kind: type[T]) -> list[T]:
        answers = await asyncio.gather(*(self._ask(handle, method, kind) for handle in self._handles.values()))
        return [answer for of_model in answers for answer in of_model]

    async def _ask(self, handle: Any, method: str, kind: type[T]) -> list[T]:
        # Not routed like a request: it must get through when every place in every queue is taken.
        try:
            async with asyncio.timeout(self._status_timeout_s):
                found = await handle.broadcast(method).results_async(return_exceptions=True)
        except Exception:
            # No replica at all, or one that hangs and spoils the round for all: ask for any that answers.
            return await self._ask_any(handle, method)
        return [answer for answer in found if isinstance(answer, kind)]

    async def _ask_any(self, handle: Any, method: str) -> list[Any]:
        response = handle.options(method_name=method).remote()
        try:
            async with asyncio.timeout(self._status_timeout_s):
                return [await response]
        except Exception:
            response.cancel()
            return []
