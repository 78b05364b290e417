"""Everything that watches one replica's calls, put together, and what it tells those who ask.

Owns: which sinks there are, and the newest failures. Must not know: Ray, HTTP.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.protocol import ReplicaStatus
from serve_app.telemetry.call_metrics import CallMetrics
from serve_app.telemetry.engine_metrics import engine_families
from serve_app.telemetry.families import Family
from serve_app.telemetry.hour import LastHour, Minute
from serve_app.telemetry.logs import CallLog, LogConfig, sentence_of
from serve_app.telemetry.record import CANCELLED, OK, CallRecord, ReplicaName
from serve_app.telemetry.recorder import Recorder, Sink, Tokens
from serve_app.telemetry.spans import SpanSink
from serve_app.telemetry.tracing import Tracing

NUM_FAILURES_KEPT = 20


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that ended with an error. ``code``: the error's."""

    at_unix_s: float
    request_id: str
    key_name: str
    code: str
    sentence: str


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What a replica shows of itself to people: its status, its pace now, its last hour, its newest failures."""

    status: ReplicaStatus
    tokens_per_s: float = 0.0
    minutes: tuple[Minute, ...] = ()
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaFamilies:
    """What a replica shows of itself to Prometheus."""

    replica: ReplicaName
    model: str
    families: tuple[Family, ...]


class ReplicaObserver:
    """The sinks of one replica. ``tracing`` None: no spans are made."""

    def __init__(self, replica: ReplicaName, logs: LogConfig, max_model_len: int, tracing: Tracing | None) -> None:
        self._replica = replica
        self._logs = logs
        self._tracing = tracing
        self._metrics = CallMetrics(max_model_len)
        self._recent = _Recent()

    def recorder(self, holds: Callable[[str], bool]) -> Recorder:
        """Make the recorder that tells the sinks; ``holds`` as there."""
        sinks: list[Sink] = [self._metrics, self._recent]
        if self._tracing is not None:
            sinks.append(SpanSink(self._tracing.tracer))
        if self._logs.calls:
            sinks.append(CallLog(with_texts=self._logs.texts))
        return Recorder(self._replica, holds, sinks, keeps_texts=self._logs.calls and self._logs.texts)

    def view(self, status: ReplicaStatus) -> ReplicaView:
        """What people see."""
        now_unix_s, hour = time.time(), self._recent.hour
        failures = tuple(self._recent.failures)
        return ReplicaView(status, hour.tokens_per_s(now_unix_s), hour.minutes(now_unix_s), failures)

    def families(self, status: ReplicaStatus) -> ReplicaFamilies:
        """What Prometheus sees."""
        engine = engine_families(
            status.engine, ready=status.ready, num_open_calls=status.num_open_calls, draining=status.draining
        )
        return ReplicaFamilies(self._replica, status.model, (*self._metrics.families(), *engine))

    def close(self) -> None:
        """Send the spans that are left."""
        if self._tracing is not None:
            self._tracing.close()


class _Recent:
    """A sink that keeps the last hour, and the newest failures."""

    def __init__(self) -> None:
        self.hour = LastHour()
        self.failures: deque[Failure] = deque(maxlen=NUM_FAILURES_KEPT)

    def tokens(self, tokens: Tokens) -> None:
        self.hour.tokens(tokens, time.time())

    def finished(self, record: CallRecord) -> None:
        self.hour.finished(record, time.time())
        if record.outcome not in (OK, CANCELLED):
            at_unix_s = record.finished_s + record.epoch_s
            call = record.call
            self.failures.append(
                Failure(at_unix_s, call.request_id, call.key_name, record.outcome, sentence_of(record))
            )
