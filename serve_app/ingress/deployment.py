"""Ingress: the Ray Serve deployment that speaks HTTP, one on every machine.

Owns: joining the HTTP application to the handles of the replicas. Must not know: MLX, models' files.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from starlette.types import ASGIApp

from serve_app.config import APP_NAME, INGRESS_NAME, AppConfig
from serve_app.ingress.accounts import AccountBook
from serve_app.ingress.auth import KeyBook
from serve_app.ingress.fleet import IngressFamilies, ServedModel, ServeFleet
from serve_app.ingress.heartbeat import Heartbeat
from serve_app.ingress.http_app import HttpSettings, build_http_app
from serve_app.ingress.ledger import Door, LocalDoor, SharedDoor, lease_s
from serve_app.ingress.observing import IngressView, IngressWatch
from serve_app.telemetry.logs import configure_logs
from serve_app.telemetry.tracing import Tracing, tracing_from_environment


@serve.ingress()
class Ingress:
    """Holds no state between requests but its handles."""

    def __init__(self, config: AppConfig, handles: Mapping[str, Any], ledger: Any = None) -> None:
        """``handles``: by model name. ``ledger``: the one that counts for all ingresses; None: this one counts."""
        self._config = config
        self._ledger = ledger
        now_unix_s = int(time.time())
        models = [ServedModel(model.name, now_unix_s, model.aliases) for model in config.models]
        self._host = platform.node()
        self._node_id = ray.get_runtime_context().get_node_id()
        configure_logs(config.logs, f"{INGRESS_NAME}-{self._node_id[:8]}")
        self._tracing = tracing_from_environment(service__instance__id=self._node_id, host__name=self._host)
        self._watch = IngressWatch(self._tracing.tracer if self._tracing else None, logs_calls=config.logs.calls)
        scaled = {model.name: model.deployment_name for model in config.models if model.scaling is not None}
        self._fleet = ServeFleet(models, handles, config.ingress.status_timeout_s, _all_ingresses, scaled)
        self._heartbeat = Heartbeat(self._fleet.statuses, config.ingress.heartbeat_s)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        limits = self._config.limits
        settings = HttpSettings(
            limits.max_body_bytes,
            limits.request_timeout_s,
            self._config.ingress.keep_alive_s,
            self._config.ingress.cors_origins,
            # Serve's proxy does; with ours the header would stand there twice.
            echoes_request_ids=False,
            name=serve.get_replica_context().replica_id.unique_id,
        )
        # Serve puts plain-text error handlers of its own into an application that has a place for them; this has none.
        return build_http_app(self._fleet, settings, KeyBook(self._config.keys, self._door()), self._watch)

    def _door(self) -> Door:
        own = LocalDoor(AccountBook(self._config.keys, lease_s(self._config)))
        return own if self._ledger is None else SharedDoor(self._ledger, own)

    async def check_health(self) -> None:
        """Serve calls this every few seconds. The ingress itself is well when it can answer that at all."""
        self._heartbeat.beat(time.monotonic())

    def families(self) -> IngressFamilies:
        """What this ingress shows to Prometheus."""
        return IngressFamilies(self._host, self._node_id, tuple(self._watch.families()))

    def view(self) -> IngressView:
        """What this ingress shows to people."""
        return self._watch.view()

    def deployments(self) -> dict[str, str]:
        """Return the deployment of each model by name and alias, for callers that come by handle and not by HTTP."""
        return {name: model.deployment_name for model in self._config.models for name in (model.name, *model.aliases)}

    async def __del__(self) -> None:
        # Serve calls this once when the ingress is to stop, after open requests had their time. A constructor that
        # raised leaves no tracing.
        tracing: Tracing | None = getattr(self, "_tracing", None)
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


def _all_ingresses() -> Any:
    """The handle of this very deployment: of its replicas on all machines."""
    return serve.get_deployment_handle(INGRESS_NAME, APP_NAME)
