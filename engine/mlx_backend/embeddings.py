"""Embeddings: what a decoder makes of a prompt's last token, before the head.

Owns: taking those hidden states out of a step, and how long they are. Must not know: what becomes of them (they are
cut and scaled where text is made), other ways to pool: a decoder's last token is the only one that has seen all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from engine.batch import BatchRow
from engine.mlx_backend.mlx_lm_parts import Model, make_prompt_cache
from engine.mlx_backend.packed_model import find_decoder


@dataclass(frozen=True, slots=True)
class RowEmbeddings:
    """Of the rows that want one: their requests, and fp32 ``[r, width]``, perhaps not computed yet."""

    request_ids: tuple[str, ...] = ()
    vectors: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        """What is to be evaluated with the step."""
        return [] if self.vectors is None else [self.vectors]

    def read(self) -> dict[str, bytes]:
        """Wait for the values; by request."""
        if self.vectors is None:
            return {}
        return {name: row.tobytes() for name, row in zip(self.request_ids, np.array(self.vectors), strict=True)}


NO_EMBEDDINGS = RowEmbeddings()


def embeddings_of(hidden: mx.array | None, rows: Sequence[tuple[int, BatchRow]]) -> RowEmbeddings:
    """Those of ``rows`` (pairs of place in ``hidden`` ``[R, width]``, and row) that want one."""
    wanting = [(place, row.request_id) for place, row in rows if row.embeds]
    if not wanting:
        return NO_EMBEDDINGS
    assert hidden is not None, "a row wants an embedding of a model that gives none"
    places = mx.array(np.array([place for place, _ in wanting], dtype=np.int32))
    return RowEmbeddings(tuple(name for _, name in wanting), hidden[places].astype(mx.float32))


def find_embedding_size(model: Model) -> int | None:
    """How many numbers an embedding of ``model`` has; None if its hidden states cannot be had. Computes one token."""
    decoder = find_decoder(model)
    if decoder is None:
        return None
    hidden = decoder(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model))
    return int(hidden.shape[-1]) if isinstance(hidden, mx.array) and hidden.ndim == 3 else None
