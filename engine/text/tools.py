"""Reads tool calls out of an answer as it grows.

Owns: what is a call and what is text. Must not know: HTTP's shapes, how a call gets its id, tokens.

A call is given out only when all of it has come and its arguments are a JSON object: whoever receives it can run it.
Anything else between the marks (a call that was cut, broken JSON, a function nobody offered) is text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.text.marks import split_at_mark
from engine.text.tool_formats import Tool, ToolFormat

# What reading a model's JSON comes to: it may be none, or nested deeper than Python follows.
UNREADABLE = (ValueError, RecursionError)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call. ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


Piece = str | ToolCall


class CallReader(Protocol):
    """Turns a growing text into text and calls."""

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return what is settled."""
        ...

    def finish(self, whole: bool) -> list[Piece]:
        """Return the rest. ``whole``: the model ended its answer by itself."""
        ...


class MarkedCallReader:
    """Calls between a format's marks, in the middle of text. White space around calls is dropped."""

    def __init__(self, tool_format: ToolFormat, tools: Sequence[Tool]) -> None:
        self._format = tool_format
        self._tools = tools
        self._names = {function_name(tool) for tool in tools}
        self._buffer = ""
        self._space = ""
        self._in_call = False
        self._after_call = False

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return what is settled."""
        self._buffer += text
        pieces: list[Piece] = []
        while True:
            if not self._in_call:
                before, after = split_at_mark(self._buffer, self._format.start)
                pieces += self._say(before)
                if after is None:
                    self._buffer = self._buffer[len(before) :]
                    return pieces
                self._in_call, self._buffer = True, after
            body, found, rest = self._buffer.partition(self._format.end) if self._format.end else ("", "", "")
            if not found:
                return pieces
            pieces += self._read(body, self._format.end)
            self._in_call, self._buffer = False, rest

    def finish(self, whole: bool) -> list[Piece]:
        """Return the rest; a last call without its end mark counts if the model meant it to be over."""
        rest, self._buffer = self._buffer, ""
        if not self._in_call:
            pieces = self._say(rest)
        else:
            pieces = self._read(rest, "") if whole else self._say(self._format.start + rest)
        return pieces if self._after_call or not self._space else [*pieces, self._space]

    def _read(self, body: str, end: str) -> list[Piece]:
        try:
            calls = list(read_calls(self._format.parse(body.strip(), list(self._tools)), self._names))
        except Exception:  # the parsers raise whatever their text leads to
            return self._say(f"{self._format.start}{body}{end}")
        self._space, self._after_call = "", True
        return [*calls]

    def _say(self, text: str) -> list[Piece]:
        """White space waits: next to a call it is no part of the answer."""
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        if not stripped:
            return []
        if self._after_call:
            stripped, self._after_call = stripped.lstrip(), False
        return [stripped]


class ArrayCallReader:
    """Calls as one JSON array and nothing else: what an answer that has to be a call is held to."""

    _decoder = json.JSONDecoder()

    def __init__(self, names: Sequence[str]) -> None:
        self._names = set(names)
        self._buffer = ""

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return the calls that are complete."""
        self._buffer += text
        pieces: list[Piece] = []
        # A call can only have become complete with a brace.
        while "}" in text:
            rest = self._buffer.lstrip(" \t\n[,")
            try:
                value, end = self._decoder.raw_decode(rest)
                pieces += read_calls(value, self._names)
            except UNREADABLE:
                break
            self._buffer = rest[end:]
        return pieces

    def finish(self, whole: bool) -> list[Piece]:
        """Return a call that was cut, as text."""
        rest = self._buffer.strip(" \t\n[],")
        return [rest] if rest else []


def function_name(tool: Tool) -> str:
    """Name of the function that ``tool`` offers."""
    return str(tool["function"]["name"])


def read_calls(parsed: Any, names: set[str]) -> Iterator[ToolCall]:
    """Yield the calls in a parser's result. Raises ValueError when one of them could not be run."""
    for call in parsed if isinstance(parsed, list) else [parsed]:
        if not isinstance(call, Mapping) or call.get("name") not in names:
            raise ValueError(f"not a call of an offered function: {call!r:.100}")
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, Mapping):
            raise ValueError("the arguments are no object")
        # Python reads and writes NaN and infinity, which no JSON has.
        yield ToolCall(str(call["name"]), json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def read_call_of(name: str, arguments: str, names: set[str]) -> ToolCall | None:
    """The call of ``name`` with the JSON text ``arguments``; None for one that could not be run."""
    try:
        return next(read_calls({"name": name, "arguments": arguments.strip() or "{}"}, names))
    except UNREADABLE:
        return None
