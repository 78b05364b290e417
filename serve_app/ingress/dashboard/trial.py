"""How the dashboard's try-it box is answered: text as it comes, then where the time went.

Owns: those events. Must not know: HTTP, or how they are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from serve_app.ingress.answers import Json, write_usage
from serve_app.protocol import Deltas


class TrialShape:
    """``{"text": ...}`` and ``{"thinking": ...}``; at the end ``{"id", "timings", "usage", "finish_reason"}``."""

    named_events = False

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def chunks(self, deltas: Deltas) -> Iterator[Json]:
        """Yield the events for one message."""
        for choice in deltas.choices:
            if choice.thinking:
                yield {"thinking": choice.thinking}
            if choice.text:
                yield {"text": choice.text}
        if deltas.usage is not None:
            yield {
                "id": self._request_id,
                "finish_reason": deltas.choices[-1].finish_reason if deltas.choices else None,
                "usage": write_usage(deltas.usage),
                "timings": None if deltas.timings is None else asdict(deltas.timings),
            }

    def whole(self, messages: Sequence[Deltas]) -> Json:
        """The box only ever streams."""
        raise AssertionError("a trial is streamed")
