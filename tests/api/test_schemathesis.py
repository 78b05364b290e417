"""The published OpenAPI document, tried out: no 5xx, and every refusal in its API's shape."""

from __future__ import annotations

import json
from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings

from serve_app.ingress.http_app import build_http_app
from tests.serve_fakes import SETTINGS, ScriptedFleet, said

schema = schemathesis.openapi.from_asgi("/openapi.json", build_http_app(ScriptedFleet(*said("hi")), SETTINGS))


@schema.parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_document_is_kept(case: Any) -> None:
    response = case.call()
    assert response.status_code < 500 or case.path == "/health"
    if response.status_code >= 400 and case.path != "/health":
        error = json.loads(response.content)["error"]
        own = {"type", "message"} if case.path.startswith("/v1/messages") else {"message", "type", "param", "code"}
        assert set(error) == own
