"""Looks for a mark in a text that is still growing.

Owns: how much of the text's end may be the beginning of the mark. Must not know: what marks mean.
"""

from __future__ import annotations


def split_at_mark(text: str, mark: str) -> tuple[str, str | None]:
    """Return what stands before ``mark`` and what follows it; None for the latter while the mark has not come.

    Without the mark the first part is what can be no part of it any more: the text less its longest end that is a
    beginning of ``mark``.
    """
    before, found, after = text.partition(mark)
    if found:
        return before, after
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return text[:-length], None
    return text, None
