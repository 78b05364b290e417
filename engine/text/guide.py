"""Leads one answer: through the model's thinking, within its budget, and then through a grammar.

Owns: which part of an answer the next token belongs to, and what is allowed there. Must not know: logits, rows, how a
mask reaches the device.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from engine.request import SamplingParams, Thinking
from engine.text.structured import GrammarCompiler, GrammarMatcher

_ALL = np.int32(-1)
_NO_THINKING = Thinking((), ())


class _Part(Enum):
    BEGINNING = "nothing said yet"
    THINKING = "thinking"
    CLOSING = "the budget is spent, and the end of thinking is being written"
    ANSWER = "the answer"


class AnswerGuide:
    """Follows one answer token by token. Used by one thread at a time."""

    def __init__(self, sampling: SamplingParams, compiler: GrammarCompiler) -> None:
        """Raises InvalidParameterError for a grammar that cannot be followed."""
        self._matcher: GrammarMatcher | None = compiler.matcher(sampling.grammar) if sampling.grammar else None
        self._thinking = sampling.thinking or _NO_THINKING
        self._end_ids = compiler.end_token_ids
        self._num_thought = 0
        self._num_closed = 0
        self._recent: tuple[int, ...] = ()
        if not self._thinking.end:
            self._part = _Part.ANSWER
        else:
            self._part = _Part.THINKING if self._thinking.is_open else _Part.BEGINNING
        self._close_if_spent()

    def fill_mask(self, masks: NDArray[np.int32], row: int) -> None:
        """Write into ``masks[row]`` which tokens may come next; shapes and errors as ``GrammarMatcher.fill_mask``."""
        match self._part:
            case _Part.CLOSING:
                masks[row] = 0
                _set(masks[row], self._thinking.end[self._num_closed], True)
            case _Part.THINKING:
                masks[row] = _ALL
                if self._matcher is not None:
                    for token_id in self._end_ids:  # an answer that ends here would not follow its grammar
                        _set(masks[row], token_id, False)
            case _Part.ANSWER | _Part.BEGINNING:
                if self._matcher is None:
                    masks[row] = _ALL
                else:
                    self._matcher.fill_mask(masks, row)
                if self._part is _Part.BEGINNING:
                    _set(masks[row], self._thinking.start[0], True)

    def accept(self, token_id: int) -> None:
        """Move on by a sampled token. Raises RequestFailedError for one that the mask did not allow."""
        match self._part:
            case _Part.BEGINNING if token_id == self._thinking.start[0]:
                self._part = _Part.THINKING
                self._close_if_spent()
            case _Part.BEGINNING | _Part.ANSWER:
                self._part = _Part.ANSWER
                if self._matcher is not None and not (self._matcher.finished and token_id in self._end_ids):
                    self._matcher.accept(token_id)
            case _Part.THINKING:
                self._think(token_id)
            case _Part.CLOSING:
                self._num_closed += 1
                if self._num_closed == len(self._thinking.end):
                    self._part = _Part.ANSWER

    def _think(self, token_id: int) -> None:
        self._num_thought += 1
        self._recent = (*self._recent, token_id)[-len(self._thinking.end) :]
        if self._recent == self._thinking.end:
            self._part = _Part.ANSWER
        else:
            self._close_if_spent()

    def _close_if_spent(self) -> None:
        budget = self._thinking.budget_tokens
        if self._part is _Part.THINKING and budget is not None and self._num_thought >= budget:
            self._part = _Part.CLOSING


def _set(mask: NDArray[np.int32], token_id: int, allowed: bool) -> None:
    words = mask.view(np.uint32)
    bit = np.uint32(1 << (token_id % 32))
    words[token_id // 32] = words[token_id // 32] | bit if allowed else words[token_id // 32] & ~bit
