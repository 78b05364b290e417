"""OpenTelemetry in one process: whether it is on, where spans go, and the context that crosses between processes.

Owns: the tracer and its set-up from OpenTelemetry's own environment variables. Must not know: which spans there are
(spans.py). Without those variables there is no tracer, and nobody makes a span.

    OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT   switch it on
    OTEL_TRACES_EXPORTER=otlp|console|none                              the same by name
    OTEL_SDK_DISABLED=true                                              switches it off
    OTEL_EXPORTER_OTLP_PROTOCOL, OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME, ...   as OpenTelemetry describes them
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
    OTEL_SDK_DISABLED,
    OTEL_SERVICE_NAME,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.semconv.attributes.service_attributes import SERVICE_NAME
from opentelemetry.trace import Span, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

SERVICE = "metalslots"
CLOSE_LIMIT_S = 3.0
OTEL_TRACES_EXPORTER = "OTEL_TRACES_EXPORTER"
_W3C = TraceContextTextMapPropagator()

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tracing:
    """A process's tracer. ``close`` sends what is left."""

    provider: TracerProvider

    @property
    def tracer(self) -> Tracer:
        """Makes spans."""
        return self.provider.get_tracer(SERVICE)

    def close(self) -> None:
        """Send what is left, and end. A collector that does not answer is not waited for: a replica is to stop."""
        thread = threading.Thread(target=self.provider.shutdown, name="tracing-end", daemon=True)
        thread.start()
        thread.join(CLOSE_LIMIT_S)


def tracing_from_environment(**resource: str) -> Tracing | None:
    """Return this process's tracing; None when it is off. ``resource``: what its spans say of their origin.

    An exporter that is asked for and missing is a line in the log, not an end: nobody's answer depends on it.
    """
    exporter = _exporter(os.environ)
    if exporter is None:
        return None
    attributes = {name.replace("__", "."): value for name, value in resource.items()}
    if OTEL_SERVICE_NAME not in os.environ:
        attributes[SERVICE_NAME] = SERVICE
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


def context_from(headers: Mapping[str, str]) -> Context:
    """The caller's context, from its W3C headers; an empty one without them."""
    return _W3C.extract(headers)


def headers_of(span: Span) -> dict[str, str]:
    """The W3C headers that make ``span`` the parent of what another process does."""
    headers: dict[str, str] = {}
    _W3C.inject(headers, set_span_in_context(span))
    return headers


def current_headers() -> dict[str, str]:
    """The W3C headers of the span that the calling code is in, if it is in one."""
    headers: dict[str, str] = {}
    _W3C.inject(headers)
    return headers


def _exporter(environment: Mapping[str, str]) -> SpanExporter | None:
    if environment.get(OTEL_SDK_DISABLED, "").lower() == "true":
        return None
    has_endpoint = bool(
        environment.get(OTEL_EXPORTER_OTLP_ENDPOINT) or environment.get(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT)
    )
    name = environment.get(OTEL_TRACES_EXPORTER) or ("otlp" if has_endpoint else "none")
    match name:
        case "otlp":
            return _otlp_exporter(environment)
        case "console":
            return ConsoleSpanExporter()
        case "none":
            return None
    logger.warning("%s is %r: write otlp, console or none. No traces are sent.", OTEL_TRACES_EXPORTER, name)
    return None


def _otlp_exporter(environment: Mapping[str, str]) -> SpanExporter | None:
    protocol = environment.get(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL) or environment.get(OTEL_EXPORTER_OTLP_PROTOCOL)
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

            exporter: SpanExporter = grpc.OTLPSpanExporter()
            return exporter
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

        return http.OTLPSpanExporter()
    except ImportError as error:
        logger.warning("No traces are sent: %s. Install metalslots[otlp].", error)
        return None
