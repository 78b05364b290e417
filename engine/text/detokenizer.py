"""Turns a growing row of tokens into text that never has to be taken back.

Owns: what of a stream is settled. Must not know: stop strings, requests, batches.
"""

from __future__ import annotations

import codecs
from collections.abc import Container, Sequence

from engine.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of one answer, piece by piece: the pieces together equal ``tokenizer.decode`` of all its tokens.

    Each token costs the same however long the answer is. Bytes of an unfinished character wait for the rest of it;
    what never gets finished becomes U+FFFD, where ``decode`` writes it too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        continues_text: bool = False,
        shown: Container[int] = (),
    ) -> None:
        """``continues_text``: the tokens go on from a text, so that a space before the first word is kept.

        ``shown``: special tokens that are written all the same.
        """
        self._pieces = tokenizer.pieces
        self._skip_special_tokens = skip_special_tokens
        self._at_start = not continues_text
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that is settled now and was not before."""
        data, self._at_start = self._pieces.join(
            token_ids,
            at_start=self._at_start,
            skip_special_tokens=self._skip_special_tokens,
            shown=self._shown,
        )
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Return what an unfinished character comes to. Nothing may be added after it."""
        return self._utf8.decode(b"", final=True)
