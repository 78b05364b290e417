"""Finds stop strings in text that arrives in pieces.

Owns: which text may be shown, which has to wait, which is cut off. Must not know: tokens, requests.

The automaton of Aho and Corasick ("Efficient string matching", 1975) over characters: its state is the longest end of
the text that begins some stop string, which is exactly the text that has to wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _State:
    """A beginning shared by stop strings: ``text[:depth]``.

    ``fallback`` is the longest proper end of it that begins a stop string too, ``ending`` the longest stop string that
    it ends with.
    """

    text: str
    depth: int
    following: dict[str, _State] = field(default_factory=dict)
    fallback: _State | None = None
    ending: str | None = None


class StopMatcher:
    """Passes text on up to the first stop string.

    The match that is complete first wins, and the longest of those complete at the same character: so the result does
    not depend on how the text was cut into pieces, and a match is known as early as it can be. Time is linear in the
    text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops`` may be empty; none of them may be the empty string."""
        assert all(stops), "an empty stop string matches everywhere"
        self._root = self._state = _build(stops)
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, once one has."""
        return self._matched

    def feed(self, text: str) -> str:
        """Return what may be shown now: no part of it can belong to a stop string. Empty after a match."""
        if self._matched is not None:
            return ""
        held = self._state
        for index, character in enumerate(text):
            self._step(character)
            if self._state.ending is not None:
                self._matched = self._state.ending
                return _head(held, text[: index + 1], len(self._matched))
        return _head(held, text, self._state.depth)

    def finish(self) -> str:
        """Return the text that waited, now that nothing follows it. Empty after a match."""
        held, self._state = self._state, self._root
        return "" if self._matched is not None else held.text[: held.depth]

    def _step(self, character: str) -> None:
        state: _State | None = self._state
        while state is not None and character not in state.following:
            state = state.fallback
        self._state = self._root if state is None else state.following[character]


def _head(held: _State, text: str, num_withheld: int) -> str:
    """``held`` and ``text`` in a row without their last ``num_withheld`` characters."""
    # Only what is passed on is copied: copying what waits at every call would be quadratic for long stop strings.
    num_shown = held.depth + len(text) - num_withheld
    return held.text[: min(held.depth, num_shown)] + text[: max(0, num_shown - held.depth)]


def _build(stops: Sequence[str]) -> _State:
    root = _State("", 0)
    for stop in stops:
        state = root
        for depth, character in enumerate(stop, 1):
            state = state.following.setdefault(character, _State(stop, depth))
        state.ending = stop
    # Breadth first: a fallback is shorter than its state, so it is complete when the state needs it.
    waiting = deque(root.following.values())
    for state in waiting:
        state.fallback = root
    while waiting:
        parent = waiting.popleft()
        for character, state in parent.following.items():
            fallback = parent.fallback
            while fallback is not None and character not in fallback.following:
                fallback = fallback.fallback
            state.fallback = root if fallback is None else fallback.following[character]
            state.ending = state.ending or state.fallback.ending
            waiting.append(state)
    return root
