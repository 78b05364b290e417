"""Server-sent events: the frames of a streamed answer.

Owns: the bytes. Must not know: what is in a chunk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

CONTENT_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
# A comment line: clients skip it, and proxies on the way see that the connection lives.
KEEP_ALIVE = b": keep-alive\n\n"


def event(value: Mapping[str, Any], *, named: bool = False) -> bytes:
    """Return one event with ``value`` as JSON on a single line; ``named`` by its ``type``."""
    # Text stays as it is: escaping would make Chinese or emoji three to six times as long.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    name = f"event: {value['type']}\n".encode() if named else b""
    return name + b"data: " + text.encode("utf-8", "replace") + b"\n\n"
