"""Reads one answer's text for what is in it: thinking, text, tool calls.

Owns: the order in which the parts are told apart, numbers and ids of calls. Must not know: tokens, HTTP's shapes.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.text.bare_calls import BareCallReader
from engine.text.harmony import HarmonyReader
from engine.text.thinking import HARMONY_MARKS, Parted, PartReader, ThinkingMarks, ThinkingReader
from engine.text.tool_formats import BARE, HARMONY, ToolFormat
from engine.text.tools import ArrayCallReader, CallReader, MarkedCallReader, Piece
from serve_app.protocol import ToolCallDelta


@dataclass(frozen=True, slots=True)
class Reading:
    """What to look for in the answers to one call. ``forced``: they are an array of calls of these functions.

    ``parallel`` False: only the first call of an answer counts.
    """

    marks: ThinkingMarks | None = None
    is_open: bool = False
    tool_format: ToolFormat | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    forced: tuple[str, ...] = ()
    parallel: bool = True

    def part_reader(self) -> PartReader | None:
        """A reader that tells an answer's thinking from the rest, for models that may think."""
        if self.marks == HARMONY_MARKS:
            return HarmonyReader(() if self.forced else self.tools)
        return ThinkingReader(self.marks, self.is_open) if self.marks else None

    def call_reader(self) -> CallReader | None:
        """A reader for one answer's calls, if it may have any."""
        if self.forced:
            return ArrayCallReader(self.forced)
        if not self.tools or self.tool_format is None or self.tool_format.name == HARMONY:
            return None
        if self.tool_format.name == BARE:
            return BareCallReader(self.tools)
        return MarkedCallReader(self.tool_format, self.tools)


@dataclass(frozen=True, slots=True)
class Read:
    """What new text came to."""

    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __add__(self, other: Read) -> Read:
        return Read(self.text + other.text, self.thinking + other.thinking, self.tool_calls + other.tool_calls)


class AnswerReader:
    """Follows one answer."""

    def __init__(self, reading: Reading) -> None:
        self._parts = reading.part_reader()
        self._calls = reading.call_reader()
        self._max_calls = None if reading.parallel else 1
        self.num_calls = 0

    @property
    def thinks(self) -> bool:
        """Whether what comes next is thinking, as far as is known."""
        return self._parts is not None and self._parts.thinks

    def feed(self, text: str) -> Read:
        """Take more text; return what is settled."""
        return self._read(self._parts.feed(text) if self._parts else Parted(answer=text))

    def finish(self, whole: bool) -> Read:
        """Return the rest. ``whole``: the model ended its answer by itself."""
        last = self._read(self._parts.finish(whole) if self._parts else Parted())
        if self._calls is None:
            return last
        return last + self._take(self._calls.finish(whole))

    def _read(self, parted: Parted) -> Read:
        pieces: Sequence[Piece] = [parted.answer] if self._calls is None else self._calls.feed(parted.answer)
        found = self._take([*pieces, *parted.calls])
        return Read(found.text, parted.thinking, found.tool_calls)

    def _take(self, pieces: Sequence[Piece]) -> Read:
        texts = [piece for piece in pieces if isinstance(piece, str)]
        deltas: list[ToolCallDelta] = []
        for piece in pieces:
            if not isinstance(piece, str) and self.num_calls != self._max_calls:
                deltas += (
                    ToolCallDelta(self.num_calls, f"call_{uuid.uuid4().hex[:24]}", piece.name),
                    ToolCallDelta(self.num_calls, arguments=piece.arguments),
                )
                self.num_calls += 1
        return Read("".join(texts), "", tuple(deltas))
