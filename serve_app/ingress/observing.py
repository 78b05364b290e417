"""Watches requests from their first byte to their last: spans, counts, and a line in the log for each that fails.

Owns: the span of a request, the one of its routing, and the ingress's own metrics. Must not know: what is in a request
or an answer. What happens inside a replica is told by the replica.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from opentelemetry.semconv.attributes import http_attributes as http
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.semconv.attributes.url_attributes import URL_PATH
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.errors import ErrorAnswer
from serve_app.ingress.scope import OBSERVATION, key_in
from serve_app.latency import E2E_BUCKETS_S
from serve_app.protocol import Deltas, GenerateCall
from serve_app.routing.decision import Decision
from serve_app.telemetry.families import Family, families_of
from serve_app.telemetry.hour import LastHour, Minute
from serve_app.telemetry.logs import CallLog
from serve_app.telemetry.lost_call import LOST, CallTrail
from serve_app.telemetry.observer import NUM_FAILURES_KEPT, Failure
from serve_app.telemetry.record import CallRecord
from serve_app.telemetry.spans import SpanSink
from serve_app.telemetry.tracing import context_from, headers_of

# Others are counted together: whoever asks for thousands of addresses must not make thousands of metrics.
COUNTED_PATHS = frozenset(
    {
        "/dashboard",
        "/dashboard/events",
        "/dashboard/state",
        "/dashboard/try",
        "/health",
        "/metrics",
        "/status",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/responses",
    }
)
# Asked every few seconds by machines: a trace of each would bury those of people.
UNTRACED_PATHS = frozenset({"/dashboard/events", "/dashboard/state", "/health", "/metrics", "/status"})
LOGGER = "metalslots.http"

logger = logging.getLogger(LOGGER)


@dataclass(frozen=True, slots=True)
class IngressView:
    """What an ingress shows to people: its newest failures, and the last hour of calls of which no replica tells."""

    failures: tuple[Failure, ...] = ()
    minutes: tuple[Minute, ...] = ()


class IngressWatch:
    """One ingress's counts, its newest failures that are not the client's doing, its tracer, and the records of calls
    that were lost with their replica.

    ``tracer`` None: no spans are made. ``logs_calls``: a lost call gets the line that every other has from its replica.
    """

    def __init__(self, tracer: Tracer | None = None, *, logs_calls: bool = False) -> None:
        self.tracer = tracer
        self.failures: deque[Failure] = deque(maxlen=NUM_FAILURES_KEPT)
        self._hour = LastHour()
        self._spans = SpanSink(tracer) if tracer is not None else None
        self._log = CallLog(with_texts=False) if logs_calls else None
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "metalslots_http_requests", "HTTP requests by their status.", ("path", "status"), registry=self._registry
        )
        self._errors = Counter("metalslots_http_errors", "Errors by code.", ("code",), registry=self._registry)
        self._duration = Histogram(
            "metalslots_http_request_duration_seconds",
            "First byte to last.",
            ("path",),
            buckets=E2E_BUCKETS_S,
            registry=self._registry,
        )
        # Of a replica that is gone: the name, and the meaning, are those of the replicas' own.
        self._calls = Counter(
            "metalslots_calls",
            "Calls that ended: ok, cancelled, or an error.",
            ("model_name", "outcome"),
            registry=self._registry,
        )

    def lost(self, record: CallRecord) -> None:
        """A call was lost with its replica."""
        self._calls.labels(record.call.model, record.outcome).inc()
        self._hour.finished(record, time.time())
        for sink in (self._spans, self._log):
            if sink is not None:
                sink.finished(record)

    def view(self) -> IngressView:
        """What people see."""
        return IngressView(tuple(self.failures), self._hour.minutes(time.time()))

    def count(self, path: str, status: int, duration_s: float, error: ErrorAnswer | None) -> None:
        """Count one request."""
        path = path if path in COUNTED_PATHS else "other"
        self._requests.labels(path, str(status)).inc()
        self._duration.labels(path).observe(duration_s)
        if error is not None:
            self._errors.labels(error.code or error.type).inc()

    def families(self) -> Sequence[Family]:
        """The counts, as they travel."""
        return families_of(self._registry)


class Observation:
    """One request."""

    def __init__(self, watch: IngressWatch, scope: Scope) -> None:
        self._watch = watch
        self._scope = scope
        self._started_s = time.monotonic()
        self._opened_unix_s = 0.0
        self._call: GenerateCall | None = None
        self._trail: CallTrail | None = None
        self._decision: Decision | None = None
        self._error: ErrorAnswer | None = None
        self._span = self._begin_span()
        self.status = 0

    def opening(self, call: GenerateCall) -> GenerateCall:
        """A call is about to be made; returns it with the span that it belongs to."""
        self._opened_unix_s = time.time()
        self._call = call if self._span is None else replace(call, trace_context=headers_of(self._span))
        self._trail = CallTrail(self._call, time.monotonic())
        return self._call

    def note(self, message: Deltas) -> None:
        """A message of the call's answer is here."""
        if self._trail is not None:
            self._trail.note(message, time.monotonic())

    def routed(self, decision: Decision | None) -> None:
        """The router has sent the call to a replica, if it is one of ours."""
        self._decision = decision

    def failed(self, error: ErrorAnswer) -> None:
        """The answer is an error, or ends with one."""
        self._error = error

    def finish(self) -> None:
        """The last byte is sent, or the client is gone."""
        duration_s = time.monotonic() - self._started_s
        self._watch.count(self._scope["path"], self.status, duration_s, self._error)
        self._tell_if_lost()
        if self._span is not None:
            self._end_span(self._span)
        if self._error is not None:
            self._log(self._error, duration_s)

    def _tell_if_lost(self) -> None:
        if self._error is None or self._error.code != LOST or self._trail is None:
            return
        call, replica_id = self._trail.call, ""
        if self._decision is not None:
            call, replica_id = replace(call, route=self._decision.route), self._decision.chosen.replica
        now_s = time.monotonic()
        self._watch.lost(self._trail.record(call, replica_id, now_s, time.time() - now_s))

    def _begin_span(self) -> Span | None:
        tracer, path = self._watch.tracer, self._scope["path"]
        if tracer is None or path in UNTRACED_PATHS:
            return None
        method = self._scope["method"]
        return tracer.start_span(
            f"{method} {path}" if path in COUNTED_PATHS else method,
            context=context_from(Headers(scope=self._scope)),
            kind=SpanKind.SERVER,
            attributes={http.HTTP_REQUEST_METHOD: method, URL_PATH: path},
        )

    def _end_span(self, span: Span) -> None:
        if self._call is not None:
            span.set_attribute("metalslots.request_id", self._call.request_id)
            span.set_attribute("metalslots.client_request_id", self._call.client_request_id)
        if self.status:
            span.set_attribute(http.HTTP_RESPONSE_STATUS_CODE, self.status)
        if self._error is not None:
            span.set_attribute(ERROR_TYPE, self._error.code or self._error.type)
            if self._error.status >= 500:
                span.set_status(Status(StatusCode.ERROR, self._error.message))
        if self._decision is not None and self._watch.tracer is not None:
            self._add_route(self._watch.tracer, span, self._decision)
        span.end()

    def _add_route(self, tracer: Tracer, parent: Span, decision: Decision) -> None:
        chosen = decision.chosen
        attributes: dict[str, str | int | float] = {
            "metalslots.route.reason": str(decision.reason),
            "metalslots.replica": chosen.replica,
            "metalslots.route.cost_s": chosen.total_s,
            "metalslots.route.cached_tokens": chosen.num_cached_tokens,
            "metalslots.route.replicas": decision.num_usable,
        }
        start_ns = round(self._opened_unix_s * 1e9)
        span = tracer.start_span("route", set_span_in_context(parent), attributes=attributes, start_time=start_ns)
        span.end(max(start_ns, round(decision.decided_unix_s * 1e9)))

    def _log(self, error: ErrorAnswer, duration_s: float) -> None:
        key, call, path = key_in(self._scope), self._call, self._scope["path"]
        if error.status in (408, 429) or error.status >= 500:
            code, who = error.code or error.type, key.name if key else ""
            request_id = call.request_id if call else Headers(scope=self._scope).get("x-request-id", "")
            self._watch.failures.append(Failure(time.time(), request_id, who, code, error.message))
        facts = {
            "path": path,
            "status": error.status,
            "code": error.code or error.type,
            "request_id": call.request_id if call else "",
            "client_request_id": Headers(scope=self._scope).get("x-request-id", ""),
            "key": key.name if key else "",
            "duration_s": duration_s,
        }
        text = "%s %s failed after %.0f ms: %s %s"
        values = (self._scope["method"], path, duration_s * 1000, error.status, facts["code"])
        logger.info(text, *values, extra={"event": "request_failed", "facts": facts})


class Observing:
    """ASGI middleware around everything that can refuse or answer a request."""

    def __init__(self, app: ASGIApp, watch: IngressWatch) -> None:
        self._app = app
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and watch it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        observation = scope[OBSERVATION] = Observation(self._watch, scope)

        async def send_watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                observation.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        finally:
            observation.finish()
