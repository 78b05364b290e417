"""An answer as a row of blocks (thinking, text, calls), as Anthropic's API and OpenAI's newer one write it.

Owns: where one block ends and the next begins. Must not know: the shape of either API.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from serve_app.protocol import ChoiceDelta, Deltas, Usage

Kind = Literal["thinking", "text", "call"]


@dataclass(slots=True)
class Block:
    """One block. ``text`` is a call's arguments where it is a call."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Everything that has come."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A block starts, gets ``text``, or stops."""

    kind: Literal["start", "delta", "stop"]
    block: Block
    text: str = ""


class BlockTracker:
    """Follows the only choice of an answer."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.usage = Usage()
        self._open: Block | None = None

    def take_all(self, messages: Sequence[Deltas]) -> None:
        """Take a whole answer."""
        for message in messages:
            for _ in self.take(message):
                pass

    def take(self, message: Deltas) -> Iterator[BlockEvent]:
        """Yield what one message brings, in order."""
        for delta in message.choices:
            yield from self._take(delta)
        self.usage = message.usage or self.usage

    def _take(self, delta: ChoiceDelta) -> Iterator[BlockEvent]:
        if delta.thinking:
            yield from self._add("thinking", delta.thinking)
        if delta.text:
            yield from self._add("text", delta.text)
        for call in delta.tool_calls:
            if call.id:
                yield from self._start(Block("call", len(self.blocks), call.id, call.name))
            if call.arguments:
                yield from self._add("call", call.arguments)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            yield from self._stop()

    def _add(self, kind: Kind, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._start(Block(kind, len(self.blocks)))
        assert self._open is not None
        self._open.parts.append(text)
        yield BlockEvent("delta", self._open, text)

    def _start(self, block: Block) -> Iterator[BlockEvent]:
        yield from self._stop()
        self._open = block
        self.blocks.append(block)
        yield BlockEvent("start", block)

    def _stop(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            stopped, self._open = self._open, None
            yield BlockEvent("stop", stopped)
