"""MetalReplica: the Ray Serve actor that holds one engine on one Mac.

Owns: the engine's life within the actor's, and calls from their arrival to their last message. Must not know: HTTP,
MLX, which replica gets which call. Ray Serve runs its methods on one event loop, which nothing here may block.
"""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import AsyncGenerator
from contextlib import aclosing

import ray
from ray import serve

from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from engine.core.engine_core import EngineCore
from engine.core.messages import Progress
from engine.errors import EngineDeadError, EngineError, StartupError
from engine.interfaces import EngineStatus
from engine.model_source import resolve_model
from engine.text.tokenizer import Tokenizer, load_tokenizer
from serve_app.config import ModelConfig, ReplicaConfig
from serve_app.protocol import Deltas, GenerateCall, ReplicaStatus
from serve_app.replica.calls import CallRunner
from serve_app.replica.reporter import Reporter
from serve_app.replica.startup_board import BoardWriter
from serve_app.replica.stats import autoscaling_stats
from serve_app.routing.report import Figure, to_stats
from serve_app.telemetry.logs import LogConfig, configure_logs
from serve_app.telemetry.observer import ReplicaFamilies, ReplicaObserver, ReplicaView
from serve_app.telemetry.record import ReplicaName
from serve_app.telemetry.tracing import tracing_from_environment

logger = logging.getLogger(__name__)


class MetalReplica:
    """Answers calls with one engine. Built when its constructor returns: Serve sends nothing before that."""

    # Serve awaits it: an engine belongs to the event loop that it is made on.
    async def __init__(  # type: ignore[misc]
        self, model: ModelConfig, config: ReplicaConfig, logs: LogConfig | None = None
    ) -> None:
        logs = logs or LogConfig()
        name = ReplicaName(
            serve.get_replica_context().replica_tag, ray.get_runtime_context().get_node_id(), platform.node()
        )
        configure_logs(logs, f"{model.deployment_name}-{name.node_id[:8]}")
        self._name = name
        self._model = model
        self._in_thread = config.engine_runs == "thread"
        self._reporter = Reporter(block_size=model.engine.block_size, prefix_cache=model.engine.prefix_cache)
        board = BoardWriter()
        try:
            tokenizer, self._engine = await self.load(board)
        except EngineError as error:
            board.failed(error if isinstance(error, StartupError) else StartupError(error.message))
            raise
        tracing = tracing_from_environment(service__instance__id=name.replica_id, host__name=name.host)
        self._observer = ReplicaObserver(name, logs, self._engine.facts.max_model_len, tracing)
        self._calls = CallRunner(
            self._engine,
            tokenizer,
            flush_interval_s=config.flush_interval_ms / 1000,
            max_messages_per_s=config.max_messages_per_s,
            max_waiting_requests=model.engine.max_waiting_requests,
            recorder=self._observer.recorder(self._engine.holds),
        )

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Deltas, None]:
        """Yield the answer's messages. Errors and timing as ``CallRunner.generate``, and ReplicaDrainingError."""
        with self._reporter.counted(call) as record:
            async with aclosing(self._calls.generate(call)) as messages:
                async for message in messages:
                    record.note(message)
                    yield message

    async def status(self) -> ReplicaStatus:
        """What this replica says of itself; never waits for the engine."""
        return ReplicaStatus(
            replica_id=self._name.replica_id,
            node_id=self._name.node_id,
            host=self._name.host,
            model=self._model.name,
            ready=self._engine.ready,
            num_open_calls=self._calls.num_open,
            draining=self._reporter.draining,
            engine=self._engine_status(),
        )

    async def view(self) -> ReplicaView:
        """What this replica shows of itself to people; never waits for the engine."""
        return self._observer.view(await self.status())

    async def metrics(self) -> ReplicaFamilies:
        """What it shows to Prometheus; never waits for the engine."""
        return self._observer.families(await self.status())

    async def stop(self, grace_s: float) -> None:
        """End the engine: running answers get ``grace_s``, the rest an error. Nothing is answered afterwards."""
        await self._engine.close(grace_s)

    async def check_health(self) -> None:
        """Raise EngineDeadError when the engine will never answer again: Serve then replaces this replica.

        It asks for the engine's heartbeat, not for an answer: a long prompt is no illness.
        """
        if not self._engine.healthy:
            raise EngineDeadError("The engine is gone and could not be restarted.")

    async def record_autoscaling_stats(self) -> dict[str, int | float]:
        """Serve asks for this periodically."""
        return autoscaling_stats(self._engine_status(), draining=self._reporter.draining)

    async def record_routing_stats(self) -> dict[str, Figure]:
        """Serve asks for this periodically and hands it to every router."""
        return to_stats(self._reporter.report(self._engine_status(), ready=self._engine.ready))

    async def set_draining(self, node_id: str, draining: bool) -> ReplicaStatus | None:
        """Take nothing new any more, or again, if this replica is on that node.

        Returns what this replica says of itself then; None on another node. A replica that starts anew takes calls.
        """
        if node_id != ray.get_runtime_context().get_node_id():
            return None
        self._reporter.draining = draining
        return await self.status()

    async def __del__(self) -> None:
        # Serve calls this once when the replica is to stop, after running calls had their time. A constructor that
        # raised leaves no engine.
        engine: AsyncEngine | None = getattr(self, "_engine", None)
        if engine is not None:
            await engine.close()
        observer: ReplicaObserver | None = getattr(self, "_observer", None)
        if observer is not None:
            await asyncio.to_thread(observer.close)

    async def load(self, board: BoardWriter) -> tuple[Tokenizer, AsyncEngine]:
        """Return the tokenizer and the started engine, reporting progress. Tests put another engine in its place."""
        board.progress("reading the tokenizer")
        source = await asyncio.to_thread(resolve_model, self._model.engine.model)
        tokenizer = await asyncio.to_thread(load_tokenizer, source)
        engine = make_engine(self._model.engine, tokenizer, in_thread=self._in_thread)

        def report(progress: Progress) -> None:
            board.progress(progress.stage, progress.fraction)

        try:
            await engine.start(report)
        except BaseException:
            await engine.close()
            raise
        return tokenizer, engine

    def _engine_status(self) -> EngineStatus | None:
        try:
            return self._engine.status()
        except EngineError:
            return None


def make_engine(config: EngineConfig, tokenizer: Tokenizer, *, in_thread: bool) -> AsyncEngine:
    """Return an engine that is not started yet: in a process of its own, or for tests on a thread of this one."""
    if not in_thread:
        return AsyncEngine.in_process(config, tokenizer)

    def build() -> EngineCore:
        # Imported on the engine's thread, and only here: this is what loads MLX.
        from engine.build import build_core

        return build_core(config, lambda _progress: None)

    return AsyncEngine.in_thread(build, tokenizer, watchdog_s=config.watchdog_s, max_held=config.max_waiting_requests)
