"""Tracing is off unless OpenTelemetry's own variables ask for it, and contexts cross processes as W3C headers."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import get_current_span

from serve_app.telemetry.tracing import Tracing, context_from, current_headers, headers_of, tracing_from_environment

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SDK_DISABLED", "TRACES_EXPORTER", "EXPORTER_OTLP_ENDPOINT", "EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)


@pytest.mark.parametrize(
    ("variables", "is_on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, False),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, None),
    ],
)
def test_the_standard_variables_switch_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_on: bool | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tracing = tracing_from_environment(host__name="mac-1")
    if is_on is not None:
        assert (tracing is not None) == is_on
    if tracing is not None:
        assert tracing.provider.resource.attributes["service.name"] == "metalslots"
        assert tracing.provider.resource.attributes["host.name"] == "mac-1"
        tracing.close()


def test_a_context_crosses_as_headers() -> None:
    tracer = Tracing(TracerProvider()).tracer
    span = tracer.start_span("here", context=context_from({"traceparent": PARENT}))
    headers = headers_of(span)
    _, trace_id, span_id, _ = headers["traceparent"].split("-")
    assert trace_id == PARENT.split("-")[1]
    assert span_id == f"{span.get_span_context().span_id:016x}"
    assert not get_current_span(context_from({"traceparent": "nonsense"})).get_span_context().is_valid
    assert current_headers() == {}
    with tracer.start_as_current_span("tool"):
        assert "traceparent" in current_headers()
