"""Parts what a model thinks from what it answers.

Owns: the marks of thinking and where an answer stands between them. Must not know: tokens' budget (guide.py), HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.text.marks import split_at_mark
from engine.text.tools import ToolCall


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The texts between which a model thinks."""

    start: str
    end: str


KNOWN_MARKS = (
    ThinkingMarks("<think>", "</think>"),
    ThinkingMarks("[THINK]", "[/THINK]"),
    ThinkingMarks("<seed:think>", "</seed:think>"),
    ThinkingMarks("<|START_THINKING|>", "<|END_THINKING|>"),
)


# What gpt-oss writes around its thinking, where it goes on to its final message (engine.text.harmony).
HARMONY_MARKS = ThinkingMarks("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")


def find_thinking_marks(template: str) -> ThinkingMarks | None:
    """Return the marks that ``template`` speaks of."""
    if speaks_harmony(template):
        return HARMONY_MARKS
    return next((marks for marks in KNOWN_MARKS if marks.end in template), None)


def speaks_harmony(template: str) -> bool:
    """Whether a model with this chat template answers in channels, as gpt-oss does."""
    return "<|channel|>" in template and "<|message|>" in template


def is_open_at_end(prompt: str, marks: ThinkingMarks) -> bool:
    """Whether the answer to ``prompt`` begins inside of thinking: templates may write the start mark themselves."""
    return prompt.rstrip().endswith(marks.start)


@dataclass(frozen=True, slots=True)
class Parted:
    """What new text came to. ``calls`` are complete; most notations have them inside of ``answer`` instead."""

    thinking: str = ""
    answer: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __add__(self, other: Parted) -> Parted:
        return Parted(self.thinking + other.thinking, self.answer + other.answer, self.calls + other.calls)


class PartReader(Protocol):
    """Tells the parts of an answer apart as it grows."""

    @property
    def thinks(self) -> bool:
        """Whether what comes next is thinking, as far as is known."""
        ...

    def feed(self, text: str) -> Parted:
        """Take more text; return what is settled."""
        ...

    def finish(self, whole: bool) -> Parted:
        """Return the rest. ``whole``: the model ended its answer by itself."""
        ...


class ThinkingReader:
    """Follows one answer. White space next to the marks belongs to neither part."""

    def __init__(self, marks: ThinkingMarks, is_open: bool) -> None:
        self._marks = marks
        self._buffer = ""
        # Thinking comes first or not at all.
        self._begun, self._open = is_open, is_open
        self._trim = is_open
        self._space = ""

    def feed(self, text: str) -> Parted:
        """Take more text; return what is settled."""
        self._buffer += text
        if not self._begun and not self._begin():
            return Parted()
        thinking = ""
        if self._open:
            before, after = split_at_mark(self._buffer, self._marks.end)
            thinking = self._think(before)
            if after is None:
                self._buffer = self._buffer[len(before) :]
                return Parted(thinking, "")
            self._open, self._trim, self._buffer = False, True, after
        return Parted(thinking, self._answer())

    @property
    def thinks(self) -> bool:
        """Whether what comes next is thinking, as far as is known."""
        return self._open

    def finish(self, whole: bool) -> Parted:
        """Return the rest. ``whole``: the model ended its answer by itself."""
        self._begun = True
        rest, self._buffer = self._buffer, ""
        return Parted(self._think(rest), "") if self._open else Parted("", rest)

    def _begin(self) -> bool:
        """Whether it is known how the answer begins."""
        text = self._buffer.lstrip()
        if text.startswith(self._marks.start):
            self._begun, self._open, self._trim = True, True, True
            self._buffer = text[len(self._marks.start) :]
        elif text and not self._marks.start.startswith(text):
            self._begun = True
        return self._begun

    def _think(self, text: str) -> str:
        text = self._space + text
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        return stripped

    def _answer(self) -> str:
        text, self._buffer = self._buffer, ""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text
