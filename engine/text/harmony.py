"""Reads the channels of gpt-oss's notation: thinking, what is said, calls.

Owns: where one message of an answer ends and the next begins, and what its header says. Must not know: HTTP's shapes,
tokens.

An answer is a row of messages, the first without its start mark, which the prompt ends with:

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

A call is a message to a function: ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}``. What
is said in the commentary to nobody is for the reader.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.text.marks import split_at_first_mark
from engine.text.thinking import Parted
from engine.text.tool_formats import Tool
from engine.text.tools import function_name, read_call_of

MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
# How a header may begin. Anything else is an answer without one, as a grammar makes it.
_BEGINNINGS = ("<|channel|>", "<|start|>", " to=")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


class HarmonyReader:
    """Follows one answer."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._names = {function_name(tool) for tool in tools}
        self._buffer = ""
        self._in_header = True
        self._channel = "final"
        self._recipient = ""
        self._has_spoken = False
        self._spoke_here = False

    @property
    def thinks(self) -> bool:
        """Whether what comes next is thinking, as far as is known."""
        return not self._in_header and self._channel == "analysis"

    def feed(self, text: str) -> Parted:
        """Take more text; return what is settled."""
        self._buffer += text
        parts = Parted()
        while True:
            if self._in_header:
                if not self._read_header():
                    return parts
                continue
            body, mark, after = split_at_first_mark(self._buffer, _ENDS)
            if self._recipient:
                if not mark:
                    return parts
                parts += self._call(body)
            else:
                parts += self._say(body)
                self._buffer = self._buffer[len(body) :]
                if not mark:
                    return parts
            # A start mark belongs to the header that follows.
            self._buffer = mark + after if mark == "<|start|>" else after
            self._in_header, self._recipient = True, ""

    def finish(self, whole: bool) -> Parted:
        """Return the rest. ``whole``: the model ended its answer by itself, so a last call is complete."""
        rest, self._buffer = self._buffer, ""
        if self._in_header:
            return Parted()
        if self._recipient and whole:
            return self._call(rest)
        self._recipient = ""
        return self._say(rest)

    def _read_header(self) -> bool:
        """Whether it is known what the message is."""
        header, found, body = self._buffer.partition(MESSAGE)
        if not found:
            begun = self._buffer
            if not begun or any(begun.startswith(b) or b.startswith(begun) for b in _BEGINNINGS):
                return False
            header, body = "", begun
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._channel = channel.group(1) if channel else "final"
        self._recipient = recipient.group(1) if recipient else ""
        self._buffer, self._in_header, self._spoke_here = body, False, False
        return True

    def _say(self, text: str) -> Parted:
        if not text:
            return Parted()
        if self._channel == "analysis":
            return Parted(thinking=text)
        apart = "\n\n" if self._has_spoken and not self._spoke_here else ""
        self._has_spoken = self._spoke_here = True
        return Parted(answer=apart + text)

    def _call(self, body: str) -> Parted:
        call = read_call_of(self._recipient, body, self._names)
        # What cannot be run is text.
        return self._say(body) if call is None else Parted(calls=(call,))
