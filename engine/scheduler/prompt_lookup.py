"""Guesses how a text goes on from how it went on before.

Owns: finding the place where its newest tokens stood earlier, and counting how often such guesses come true. Must not
know: whether a guess is worth trying.

Answers that quote their prompt (summaries, corrected code, extracted fields) repeat long passages of it, and so do
lists and tables. No second model is needed to guess these (Saxena 2023, "Prompt Lookup Decoding").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Guess = tuple[int, ...]

# Two tokens match by chance in any text, four miss where a passage begins.
_MATCHED_TOKENS = 3
# Older tokens are forgotten: a fresh index of a long prompt must not take longer than a step.
_MOST_TOKENS = 16_384
_MEMORY_OF_HITS = 0.95
_FIRST_HIT_RATE = 0.5
_MOST_HIT_RATE = 0.95


class PromptLookup:
    """Where each run of three tokens of one text last stood. The text only ever grows."""

    def __init__(self) -> None:
        self._next_position: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def guess(self, token_ids: Sequence[int], max_tokens: int) -> Guess:
        """Up to ``max_tokens`` tokens that followed the newest ones where they stood before; empty if they never did.

        A guess that reaches the text's end goes on with itself: what repeated once may repeat again.
        """
        self._index(token_ids)
        length = len(token_ids)
        start = self._next_position.get(tuple(token_ids[length - _MATCHED_TOKENS :])) if max_tokens > 0 else None
        if start is None:
            return ()
        period = length - start
        return tuple([token_ids[start + index % period] for index in range(max_tokens)])

    def _index(self, token_ids: Sequence[int]) -> None:
        """Take in all runs but the newest, which would only find itself."""
        first = max(self._num_indexed, _MATCHED_TOKENS, len(token_ids) - _MOST_TOKENS)
        for end in range(first, len(token_ids)):
            self._next_position[tuple(token_ids[end - _MATCHED_TOKENS : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids))


@dataclass(slots=True)
class DraftRecord:
    """One request's guesses. ``expected``: the token that was guessed to come next.

    ``num_hits`` of ``num_tried`` guesses came true, older ones counting for less.
    """

    lookup: PromptLookup = field(default_factory=PromptLookup)
    expected: int | None = None
    num_hits: float = _FIRST_HIT_RATE
    num_tried: float = 1.0

    @property
    def hit_rate(self) -> float:
        """How likely a guess comes true."""
        return min(_MOST_HIT_RATE, self.num_hits / self.num_tried)

    def saw(self, token_ids: Sequence[int], *, guess_again: bool) -> None:
        """The newest of ``token_ids`` has just become known: judge the guess at it, and guess the next."""
        if self.expected is not None:
            self.num_hits = self.num_hits * _MEMORY_OF_HITS + (token_ids[-1] == self.expected)
            self.num_tried = self.num_tried * _MEMORY_OF_HITS + 1.0
        guess = self.lookup.guess(token_ids, 1) if guess_again else ()
        self.expected = guess[0] if guess else None
