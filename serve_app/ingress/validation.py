"""Turns what pydantic found wrong with a body into one typed error that names the field.

Owns: the wording and the field's path. Must not know: the request models.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import InvalidParameterError
from serve_app.errors import MalformedRequestError, UnsupportedParameterError
from serve_app.ingress.wire import UNKNOWN_PARAMETER, UNSUPPORTED_PARAMETER

# What pydantic puts into a place besides names: the body itself, and which choice of a union it tried.
_NO_FIELD = re.compile(r"body|\[key\]|[a-z-]+\[.*\]|[A-Z]\w*")
_NOT_AN_OBJECT = "The body must be a JSON object, sent with the header Content-Type: application/json."


def explain(findings: Sequence[Mapping[str, Any]]) -> Exception:
    """Return the error for pydantic's first finding. ``findings`` are as FastAPI collects them, ``body`` first."""
    finding = findings[0]
    if finding["type"] == "json_invalid":
        reason = finding.get("ctx", {}).get("error", "syntax error")
        return MalformedRequestError(f"The body is not valid JSON: {reason} (character {finding['loc'][-1]}).")
    param = _path(finding)
    if not param:
        return MalformedRequestError(_NOT_AN_OBJECT)
    message = f"`{param}`: {finding['msg'].rstrip('.')}."
    if finding["type"] == UNSUPPORTED_PARAMETER:
        return UnsupportedParameterError(message, param)
    if finding["type"] not in (UNKNOWN_PARAMETER, "missing"):
        message += f" Given: {_short(finding.get('input'))}."
    return InvalidParameterError(message, param)


def _path(finding: Mapping[str, Any]) -> str:
    parts = [part for part in finding["loc"] if not (isinstance(part, str) and _NO_FIELD.fullmatch(part))]
    # An unknown field is found by its object's validator, which has the object's place and keeps the name aside.
    if finding["type"] == UNKNOWN_PARAMETER:
        parts.append(finding["ctx"]["param"])
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path[:200]


def _short(value: Any) -> str:
    shortener = reprlib.Repr()
    shortener.maxlevel = 2
    shortener.maxlist = shortener.maxdict = 3
    shortener.maxstring = shortener.maxlong = shortener.maxother = 60
    return shortener.repr(value)
