"""The replicas as the HTTP side sees them: models by name, calls, and what every replica says of itself.

Owns: names and aliases, and the two questions asked of replicas. Must not know: HTTP. ``Fleet`` is the seam: tests and
other data paths stand in for Ray Serve there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from serve_app.autoscaling import journal
from serve_app.autoscaling.journal import ScalingHistory
from serve_app.errors import ModelUnknownError
from serve_app.ingress.observing import IngressView
from serve_app.protocol import Deltas, GenerateCall, ReplicaStatus
from serve_app.routing.journal import JOURNAL
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
        """Return what every replica says of itself, and of those that do not answer in time for how long."""
        ...

    async def views(self) -> Sequence[ReplicaView]:
        """Return what they show of themselves to people; of those that do not answer only their status."""
        ...

    async def families(self) -> Sequence[ReplicaFamilies]:
        """Return what those that answer show to Prometheus."""
        ...

    async def ingress_families(self) -> Sequence[IngressFamilies]:
        """Return what all ingresses show to Prometheus; none where each answers for itself."""
        ...

    async def ingress_views(self) -> Sequence[IngressView]:
        """Return what all ingresses show to people; none where each answers for itself."""
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
        self._said_last: dict[str, ReplicaStatus] = {}
        self._reading: dict[str, asyncio.Future[ScalingHistory]] = {}

    @property
    def models(self) -> Sequence[ServedModel]:
        """The served models."""
        return self._models

    def open(self, call: GenerateCall) -> CallStream:
        """Return the call's stream, which is cancelled when it is left."""
        return ReplicaStream(self._handles[call.model], call)

    async def statuses(self) -> Sequence[ReplicaStatus]:
        """Return what every replica says of itself, and of those that do not answer in time for how long."""
        asked = self._present()
        answers = await self._ask_all("status", ReplicaStatus)
        return [*answers, *self._silent(asked, answers)]

    async def views(self) -> Sequence[ReplicaView]:
        """Return what they show of themselves to people; of those that do not answer only their status."""
        asked = self._present()
        answers = await self._ask_all("view", ReplicaView)
        return [*answers, *map(ReplicaView, self._silent(asked, [answer.status for answer in answers]))]

    async def families(self) -> Sequence[ReplicaFamilies]:
        """Return what those that answer show to Prometheus."""
        return await self._ask_all("metrics", ReplicaFamilies)

    async def ingress_families(self) -> Sequence[IngressFamilies]:
        """Return what all ingresses show to Prometheus; none where each answers for itself."""
        return [] if self._peers is None else await self._ask(self._peers(), "families", IngressFamilies)

    async def ingress_views(self) -> Sequence[IngressView]:
        """Return what all ingresses show to people; none where each answers for itself."""
        return [] if self._peers is None else await self._ask(self._peers(), "view", IngressView)

    async def scaling(self) -> Mapping[str, ScalingHistory]:
        """Return the decisions on how many replicas there should be, by model."""
        histories = await asyncio.gather(*map(self._history, self._scaled.values()))
        return dict(zip(self._scaled, histories, strict=True))

    async def _history(self, deployment: str) -> ScalingHistory:
        # While Ray's head is away its store answers nobody, for minutes: one thread waits for it, and no request.
        reading = self._reading.get(deployment)
        if reading is None or reading.done():
            reading = self._reading[deployment] = asyncio.ensure_future(asyncio.to_thread(journal.read, deployment))
        done, _ = await asyncio.wait((reading,), timeout=self._status_timeout_s)
        return reading.result() if done else ScalingHistory()

    async def _ask_all(self, method: str, kind: type[T]) -> list[T]:
        answers = await asyncio.gather(*(self._ask(handle, method, kind) for handle in self._handles.values()))
        return [answer for of_model in answers for answer in of_model]

    async def _ask(self, handle: Any, method: str, kind: type[T]) -> list[T]:
        """Return the answers that come in time."""
        try:
            async with asyncio.timeout(self._status_timeout_s):
                # Not routed like a request: it must get through when every place in every queue is taken. Serve's own
                # `results_async` gives all answers or none, so a replica that hangs would hide the others.
                asked = await handle.broadcast(method)._fetch_replica_results_async()
        except Exception:
            return []  # there is no replica
        answering = [asyncio.ensure_future(answer.get_async()) for answer in asked]
        try:
            await asyncio.wait(answering, timeout=self._status_timeout_s)
        finally:
            for answer, task in zip(asked, answering, strict=True):
                if task.cancel():
                    answer.cancel()
        found = await asyncio.gather(*answering, return_exceptions=True)
        return [answer for answer in found if isinstance(answer, kind)]

    def _present(self) -> set[str]:
        return {name for handle in self._handles.values() for name in JOURNAL.present(handle.deployment_name)}

    def _silent(self, asked: set[str], answers: Sequence[ReplicaStatus]) -> Iterator[ReplicaStatus]:
        """Yield those of the replicas ``asked`` that are still there and have not answered."""
        said, self._said_last = self._said_last, {answer.replica_id: answer for answer in answers}
        for model, handle in self._handles.items():
            for name, presence in JOURNAL.present(handle.deployment_name).items():
                if name not in asked or name in self._said_last:
                    continue
                last = said.get(name) or ReplicaStatus(name, presence.node_id, "", model, False, 0)
                self._said_last[name] = last
                silent_s = max(self._status_timeout_s, time.monotonic() - presence.heard_s)
                yield replace(last, ready=False, engine=None, silent_s=silent_s)
