"""A call that is lost with its replica is told once, everywhere that calls are: its ingress makes the record."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.errors import AdmissionRefusedError, EngineDeadError
from engine.request import FinishReason
from serve_app.errors import ReplicaLostError
from serve_app.ingress.observing import IngressView, IngressWatch
from serve_app.protocol import ChoiceDelta, Deltas, GenerateCall, Usage
from serve_app.routing.decision import Candidate, Decision, Reason
from serve_app.telemetry.logs import CALLS, JsonFormatter
from serve_app.telemetry.lost_call import CallTrail
from serve_app.telemetry.tracing import Tracing
from tests.serve_fakes import CHAT, Client, ScriptedFleet, client_of, said
from tests.telemetry_samples import values_of

PROMPT = Usage(num_prompt_tokens=7, num_cached_tokens=4)
BEGUN = (Deltas((ChoiceDelta(0, "one", (1,)),), prompt_usage=PROMPT), Deltas((ChoiceDelta(0, "two", (2, 3)),)))
LOST = ReplicaLostError("gone")


class RoutedFleet(ScriptedFleet):
    """One whose calls a router of ours has sent somewhere."""

    def open(self, call: GenerateCall) -> Any:
        stream: Any = super().open(call)
        chosen = Candidate("r7", 0.5, 0.25, 0.0, 0.25, 0.0, 0.0, 0.0, 64)
        stream.decision = Decision(call.request_id, Reason.CACHED, chosen, (), (), 100, 3, time.time())
        return stream


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """What the log of calls gets."""
    found: list[dict[str, Any]] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(json.loads(JsonFormatter().format(record)))

    logger, handler = logging.getLogger(CALLS), Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)


@pytest.mark.parametrize("stream", [True, False])
async def test_it_is_counted_logged_traced_and_shown_once(stream: bool, lines: list[dict[str, Any]]) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    watch = IngressWatch(Tracing(provider).tracer, logs_calls=True)
    client = client_of(RoutedFleet(*BEGUN, LOST), watch=watch)
    await client.post("/v1/chat/completions", {**CHAT, "stream": stream})

    counted = values_of(tuple(watch.families()))
    assert counted['metalslots_calls_total{model_name="chain",outcome="replica_lost"}'] == 1
    assert counted['metalslots_http_errors_total{code="replica_lost"}'] == 1
    assert (
        b'metalslots_calls_total{ingress="",model_name="chain",outcome="replica_lost"} 1.0'
        in (await client.get("/metrics")).body
    )

    (line,) = lines
    assert (line["event"], line["outcome"], line["replica"], line["model"]) == (
        "call_finished",
        "replica_lost",
        "r7",
        "chain",
    )
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (7, 4, 3)
    assert line["route"] == {"reason": "cached", "replica": "r7"}

    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"POST /v1/chat/completions", "route", "chat chain", "decode"}
    call = spans["chat chain"]
    assert call.parent is not None
    assert call.parent.span_id == spans["POST /v1/chat/completions"].context.span_id
    attributes = call.attributes or {}
    assert (attributes["error.type"], attributes["gen_ai.usage.output_tokens"]) == ("replica_lost", 3)

    await _shown_once(client)


async def _shown_once(client: Client) -> None:
    page = (await client.get("/dashboard/state")).json
    assert (page["hour"]["calls"], page["hour"]["failed"]) == (1, 1)
    assert page["hour"]["queue_s"]["p50"] is None, "nobody knows when it was begun"
    assert [failure["code"] for failure in page["failures"]] == ["replica_lost"]


@pytest.mark.parametrize(
    "script",
    [said("all", "well"), (*BEGUN, EngineDeadError("died")), (AdmissionRefusedError("requests", 64, 65, 1.0),)],
    ids=["answered", "failed in the replica", "refused by the replica"],
)
async def test_what_a_replica_tells_of_is_not_told_again(script: Any, lines: list[dict[str, Any]]) -> None:
    watch = IngressWatch(logs_calls=True)
    await client_of(ScriptedFleet(*script), watch=watch).post("/v1/chat/completions", CHAT)
    assert not [name for name in values_of(tuple(watch.families())) if name.startswith("metalslots_calls")]
    assert watch.view().minutes == ()
    assert lines == []


async def test_the_page_shows_what_other_ingresses_have_lost() -> None:
    elsewhere = IngressWatch()
    await client_of(ScriptedFleet(LOST), watch=elsewhere).post("/v1/chat/completions", CHAT)

    class Fleet(ScriptedFleet):
        async def ingress_views(self) -> list[IngressView]:
            return [elsewhere.view(), IngressView()]

    await _shown_once(client_of(Fleet()))


def test_the_record_has_what_was_seen_of_every_answer() -> None:
    call = GenerateCall("c1", "chain", prompts=("a",), n=3)
    trail = CallTrail(call, 10.0)
    trail.note(Deltas((ChoiceDelta(0, "x", (1,)),), prompt_usage=PROMPT), 12.0)
    trail.note(Deltas((ChoiceDelta(2, "y", (1, 2), finish_reason="length"),)), 13.0)
    record = trail.record(call, "r7", 20.0, 1000.0)
    assert (record.duration_s, record.ttft_s, record.num_prompt_tokens, record.num_output_tokens) == (10.0, 2.0, 7, 3)
    first, last = record.answers
    assert (first.choice, first.account.finish_reason, first.decode_s) == (0, FinishReason.ERROR, 8.0)
    assert (last.choice, last.account.finish_reason, last.decode_s) == (2, FinishReason.LENGTH, 0.0)
    assert (first.queue_s, first.prefill_s) == (None, None)
