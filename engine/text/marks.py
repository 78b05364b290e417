"""Looks for a mark in a text that is still growing.

Owns: how much of the text's end may be the beginning of the mark. Must not know: what marks mean.
"""

from __future__ import annotations

from collections.abc import Sequence


def split_at_mark(text: str, mark: str) -> tuple[str, str | None]:
    """Return what stands before ``mark`` and what follows it; None for the latter while the mark has not come.

    Without the mark the first part is what can be no part of it any more: the text less its longest end that is a
    beginning of ``mark``.
    """
    before, found, after = split_at_first_mark(text, (mark,))
    return before, after if found else None


def split_at_first_mark(text: str, marks: Sequence[str]) -> tuple[str, str, str]:
    """Return what stands before the first of ``marks`` in ``text``, that mark, and what follows it.

    While none has come the last two are empty, and the first is as in ``split_at_mark`` for all of the marks.
    """
    places = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    if places:
        place, mark = min(places)
        return text[:place], mark, text[place + len(mark) :]
    longest = max(len(mark) for mark in marks) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length], "", ""
    return text, "", ""
