"""What an ingress still does when Ray Serve stops it, and how long it may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serve_app.app import build_app
from serve_app.config import load_app_config
from serve_app.ingress.deployment import Ingress
from serve_app.ingress.observing import IngressWatch
from serve_app.telemetry.tracing import Tracing
from tests.serve_fakes import CHAT, ScriptedFleet, client_of, said


async def test_it_sends_the_spans_that_it_still_has() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
    tracing = Tracing(provider)
    ingress: Any = SimpleNamespace()
    await Ingress.__del__(ingress)  # of a constructor that raised
    ingress._tracing = tracing
    client = client_of(ScriptedFleet(*said("hello")), watch=IngressWatch(tracing.tracer))
    await client.post("/v1/chat/completions", CHAT)
    assert exporter.get_finished_spans() == ()
    await Ingress.__del__(ingress)
    assert [span.name for span in exporter.get_finished_spans()] == ["POST /v1/chat/completions"]


def test_an_update_gives_answers_as_long_on_their_way_as_at_their_replica() -> None:
    application: Any = build_app(load_app_config({"replica": {"shutdown_grace_s": 300.0}}))
    ingress = application._bound_deployment
    (replica,) = (bound for bound in ingress.init_args[1].values())
    for deployment in (ingress, replica._bound_deployment):
        assert deployment._deployment_config.graceful_shutdown_timeout_s > 300
