"""What each token adds to a text, as bytes.

Owns: the one rule by which ids become text; decoding, streaming and logprobs all follow it.
Must not know: requests, streams.

A text is the UTF-8 reading of its tokens' bytes, one after the other. A token adds the same bytes wherever it stands,
except at the beginning of a text, where sentencepiece drops one space. The tokenizer's own decoder says what the bytes
are; only tokens that hold part of a character (byte-level alphabets, ``<0xE4>`` tokens) are read here.

One difference from ``tokenizers``: a run of ``<0x..>`` tokens that is not valid UTF-8 becomes U+FFFD in whole there,
even its valid characters. Here a character is kept once it is complete, so that it can be streamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator
from typing import Any

import tokenizers

from engine.errors import UnsupportedModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Decoders under which a token's text depends on its neighbours in ways that the rule above cannot say.
_CONTEXTUAL = {"BPEDecoder", "CTC"}


class TokenPieces:
    """Bytes of every token of one tokenizer. Safe to share between threads.

    Ids without a token have no bytes: models pad their vocabularies, and the tokenizer skips such ids too.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Raises UnsupportedModelError for a decoder whose tokens have no bytes of their own."""
        kinds = {step["type"] for step in _steps(backend)}
        if kinds & _CONTEXTUAL:
            raise UnsupportedModelError(
                f"The tokenizer's decoder is of kind {', '.join(sorted(kinds & _CONTEXTUAL))}, "
                "whose text cannot be streamed token by token.",
                "use a model with a byte-level or sentencepiece tokenizer",
            )
        self._backend = backend
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        self._special = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        # Filled as tokens turn up. Two threads may both find a gap: they fill it with the same bytes.
        self._inner: dict[int, bytes] = {}

    def is_special(self, token_id: int) -> bool:
        """Whether a token is left out with the special ones."""
        return token_id in self._special

    def join(
        self,
        token_ids: Iterable[int],
        *,
        at_start: bool,
        skip_special_tokens: bool,
        shown: Container[int] = (),
    ) -> tuple[bytes, bool]:
        """Return the bytes of ``token_ids`` in a row, and whether the text is still at its start after them.

        ``shown`` special tokens are never skipped.
        """
        parts = []
        for token_id in token_ids:
            if skip_special_tokens and token_id in self._special and token_id not in shown:
                continue
            if not at_start:
                parts.append(self.inner(token_id))
            elif self._backend.id_to_token(token_id) is not None:
                parts.append(self.first(token_id))
                at_start = False
        return b"".join(parts), at_start

    def inner(self, token_id: int) -> bytes:
        """Bytes that a token adds anywhere but at the start of a text."""
        piece = self._inner.get(token_id)
        if piece is None:
            piece = self._inner[token_id] = self._find_inner(token_id)
        return piece

    def first(self, token_id: int) -> bytes:
        """Bytes that a token adds at the start of a text."""
        inner = self.inner(token_id)
        if self._alphabet is not None or (self._is_byte(token_id) and inner != b" "):
            return inner
        return self._decode([token_id])

    def _find_inner(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet is not None:
            values = [self._alphabet.get(character) for character in token]
            # An added token is written as it reads, in characters outside the alphabet.
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        if self._is_byte(token_id):
            return bytes.fromhex(token[3:5])
        # The second of two equal tokens stands inside a text.
        return self._decode([token_id, token_id])[len(self._decode([token_id])) :]

    def _is_byte(self, token_id: int) -> bool:
        return self._has_byte_tokens and bool(_BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or ""))

    def _decode(self, token_ids: list[int]) -> bytes:
        return self._backend.decode(token_ids, skip_special_tokens=False).encode()


def _steps(backend: tokenizers.Tokenizer) -> Iterator[dict[str, Any]]:
    if backend.decoder is None:
        return
    # A decoder's state is its part of tokenizer.json; serialising the whole tokenizer would take a second.
    waiting = [json.loads(backend.decoder.__getstate__())]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting += step["decoders"]
        else:
            yield step


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 characters stand for themselves, the rest for U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(0x100) if value not in printable]
    return {chr(value): value for value in printable} | {chr(0x100 + n): value for n, value in enumerate(others)}
