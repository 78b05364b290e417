"""Reads one answer's text for what is in it: thinking, text, tool calls.

Owns: the order in which the parts are told apart, numbers and ids of calls. Must not know: tokens, HTTP's shapes.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.text.thinking import Parted, ThinkingMarks, ThinkingReader
from engine.text.tool_formats import ToolFormat
from engine.text.tools import ArrayCallReader, CallReader, MarkedCallReader, Piece
from serve_app.protocol import ToolCallDelta


@dataclass(frozen=True, slots=True)
class Reading:
    """What to look for in the answers to one call. ``forced``: they are an array of calls of these functions."""

    marks: ThinkingMarks | None = None
    is_open: bool = False
    tool_format: ToolFormat | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    forced: tuple[str, ...] = ()

    def call_reader(self) -> CallReader | None:
        """A reader for one answer's calls, if it may have any."""
        if self.forced:
            return ArrayCallReader(self.forced)
        return MarkedCallReader(self.tool_format, self.tools) if self.tool_format and self.tools else None


@dataclass(frozen=True, slots=True)
class Read:
    """What new text came to."""

    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class AnswerReader:
    """Follows one answer."""

    def __init__(self, reading: Reading) -> None:
        self._thinking = ThinkingReader(reading.marks, reading.is_open) if reading.marks else None
        self._calls = reading.call_reader()
        self.num_calls = 0

    def feed(self, text: str) -> Read:
        """Take more text; return what is settled."""
        return self._read(self._thinking.feed(text) if self._thinking else Parted("", text))

    def finish(self, whole: bool) -> Read:
        """Return the rest. ``whole``: the model ended its answer by itself."""
        last = self._read(self._thinking.finish() if self._thinking else Parted("", ""))
        if self._calls is None:
            return last
        rest = self._take(self._calls.finish(whole))
        return Read(last.text + rest.text, last.thinking, last.tool_calls + rest.tool_calls)

    def _read(self, parted: Parted) -> Read:
        if self._calls is None:
            return Read(parted.answer, parted.thinking)
        found = self._take(self._calls.feed(parted.answer))
        return Read(found.text, parted.thinking, found.tool_calls)

    def _take(self, pieces: Sequence[Piece]) -> Read:
        texts = [piece for piece in pieces if isinstance(piece, str)]
        deltas: list[ToolCallDelta] = []
        for piece in pieces:
            if not isinstance(piece, str):
                deltas += (
                    ToolCallDelta(self.num_calls, f"call_{uuid.uuid4().hex[:24]}", piece.name),
                    ToolCallDelta(self.num_calls, arguments=piece.arguments),
                )
                self.num_calls += 1
        return Read("".join(texts), "", tuple(deltas))
