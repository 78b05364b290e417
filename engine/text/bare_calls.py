"""Calls without marks: an answer that is the JSON of a call and nothing else, as Llama 3 writes them.

Owns: telling such an answer from text. Must not know: HTTP's shapes, tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from engine.text.tool_formats import PYTHON_TAG, Tool
from engine.text.tools import UNREADABLE, Piece, function_name, read_calls

_BETWEEN = " \t\r\n;,"


class BareCallReader:
    """An answer is text from the first character that cannot belong to a call."""

    _decoder = json.JSONDecoder()

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._names = {function_name(tool) for tool in tools}
        self._buffer = ""
        self._is_text = False
        self._num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return what is settled."""
        if self._is_text:
            return [text]
        self._buffer += text
        pieces: list[Piece] = []
        while True:
            rest = self._buffer.lstrip(_BETWEEN).removeprefix(PYTHON_TAG).lstrip(_BETWEEN)
            if not rest or PYTHON_TAG.startswith(rest):
                return pieces
            if not rest.startswith("{"):
                return [*pieces, *self._give_up()]
            # A call can only have become complete with a brace.
            if "}" not in text:
                return pieces
            try:
                value, end = self._decoder.raw_decode(rest)
            except UNREADABLE:
                return pieces
            try:
                found = list(read_calls(value, self._names))
            except UNREADABLE:
                return [*pieces, *self._give_up()]
            pieces += found
            self._num_calls += len(found)
            self._buffer = rest[end:]

    def finish(self, whole: bool) -> list[Piece]:
        """Return the rest: a call that was cut is text."""
        return self._give_up() if self._buffer.strip(_BETWEEN) or not self._num_calls else []

    def _give_up(self) -> list[Piece]:
        text, self._buffer, self._is_text = self._buffer, "", True
        if self._num_calls:
            text = text.lstrip(_BETWEEN)
        return [text] if text else []
