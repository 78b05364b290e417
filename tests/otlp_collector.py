"""Takes OTLP over HTTP, as a collector does, and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class CollectedSpan:
    """One span as it arrived. Ids are hexadecimal; ``parent_id`` is empty for a trace's first."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    process: str


@dataclass
class Collector:
    """Where it listens, and what has come."""

    url: str
    spans: list[CollectedSpan] = field(default_factory=list)

    def trace(self, trace_id: str) -> list[CollectedSpan]:
        """The spans of one trace."""
        return [span for span in list(self.spans) if span.trace_id == trace_id]

    def take(self, body: bytes) -> None:
        """Read one export."""
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
            for scope in resource_spans.scope_spans:
                self.spans += [_collected(span, resource.get("service.instance.id", "")) for span in scope.spans]


def _collected(span: Any, process: str) -> CollectedSpan:
    attributes = {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}
    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
    return CollectedSpan(span.name, *ids, attributes, process)


@contextmanager
def collector() -> Iterator[Collector]:
    """Collect until the block is left."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, name="collector", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
