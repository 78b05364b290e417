"""An error's body in the shape of the API that was asked.

Owns: which address speaks whose shape. Must not know: where errors come from.
"""

from __future__ import annotations

from typing import Any

from serve_app.errors import ErrorAnswer

MESSAGES_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(answer: ErrorAnswer, path: str) -> dict[str, Any]:
    """OpenAI's error object; below /v1/messages Anthropic's."""
    if not path.startswith(MESSAGES_PATH):
        return answer.body
    kind = _ANTHROPIC_TYPES.get(answer.status, "api_error" if answer.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": answer.message}}
