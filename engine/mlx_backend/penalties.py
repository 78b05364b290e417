"""Logit bias and the repetition, presence and frequency penalties.

Owns: which tokens each penalised request has seen, as device arrays of one row per such request. Must not know: how a
token is chosen afterwards.

Presence and frequency count generated tokens (OpenAI), repetition counts prompt and generated ones. The order is bias,
repetition, frequency, presence (vLLM).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engine.batch import BatchRow
from engine.request import SamplingParams


def is_adjusted(sampling: SamplingParams) -> bool:
    """Whether the logits of such a request are changed at all."""
    return bool(sampling.logit_bias) or _is_penalised(sampling)


def _is_penalised(sampling: SamplingParams) -> bool:
    neutral = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    return not neutral


class TokenHistory:
    """Counts of generated tokens and a mark on prompt tokens, ``[capacity, V]``, for penalised requests.

    Memory is taken when the first penalised request comes.
    """

    def __init__(self, num_slots: int, vocab_size_tokens: int) -> None:
        self._shape = (num_slots, vocab_size_tokens)
        self._free = list(range(num_slots))
        self._index: dict[str, int] = {}
        self._num_counted: dict[str, int] = {}
        self.generated: mx.array | None = None
        self.prompted: mx.array | None = None

    def follow(self, rows: Sequence[BatchRow], newest: mx.array | None = None) -> mx.array:
        """Bring the counts of ``rows`` up to date and return their places, int32 ``[len(rows)]``.

        ``newest`` holds each row's newest token, for rows whose newest token the host does not know yet.
        """
        if self.generated is None or self.prompted is None:
            self.generated = mx.zeros(self._shape, mx.float32)
            self.prompted = mx.zeros(self._shape, mx.bool_)
        for row in rows:
            if row.request_id not in self._index:
                self._start(row)
        places = [self._index[row.request_id] for row in rows]
        new = [
            (place, token)
            for place, row in zip(places, rows, strict=True)
            for token in row.token_ids[self._num_counted[row.request_id] :]
        ]
        if new:
            at, tokens = mx.array(np.array(new, dtype=np.int32)).T
            self.generated = self.generated.at[at, tokens].add(1.0)
        num_tokens = [len(row.token_ids) for row in rows]
        pending = [i for i, row in enumerate(rows) if num_tokens[i] < row.start + row.num_tokens]
        if pending:
            assert newest is not None, "a row's newest token is not known to the host"
            at = mx.array(np.array([places[i] for i in pending], dtype=np.int32))
            self.generated = self.generated.at[at, newest[mx.array(pending)]].add(1.0)
            for i in pending:
                num_tokens[i] += 1
        self._num_counted.update(zip((row.request_id for row in rows), num_tokens, strict=True))
        return mx.array(np.array(places, dtype=np.int32))

    def _start(self, row: BatchRow) -> None:
        assert self.generated is not None
        assert self.prompted is not None
        place = self._index[row.request_id] = self._free.pop()
        self._num_counted[row.request_id] = row.num_prompt_tokens
        self.generated[place] = 0.0
        self.prompted[place] = False
        prompt = np.unique(np.array(row.token_ids[: row.num_prompt_tokens], dtype=np.int32))
        self.prompted[place, mx.array(prompt)] = True

    def forget(self, request_ids: Sequence[str]) -> None:
        """Free the places of requests that ended or were preempted; they are rebuilt when those come back."""
        for request_id in request_ids:
            place = self._index.pop(request_id, None)
            if place is not None:
                self._free.append(place)
                del self._num_counted[request_id]

    def state(self) -> list[mx.array]:
        """Arrays to evaluate at the end of a step."""
        return [array for array in (self.generated, self.prompted) if array is not None]


def adjust(
    logits: mx.array, rows: Sequence[BatchRow], history: TokenHistory, newest: mx.array | None = None
) -> mx.array:
    """``logits`` ``[len(rows), V]`` of adjusted rows with bias and penalties applied. ``newest``: as in ``follow``."""
    logits = _add_bias(logits, rows)
    penalised = [i for i, row in enumerate(rows) if _is_penalised(row.sampling)]
    if not penalised:
        return logits
    chosen = [rows[i] for i in penalised]
    at = mx.array(np.array(penalised, dtype=np.int32))
    logits[at] = _penalise(logits[at], chosen, history, None if newest is None else newest[at])
    return logits


def _add_bias(logits: mx.array, rows: Sequence[BatchRow]) -> mx.array:
    entries = [(i, token, bias) for i, row in enumerate(rows) for token, bias in row.sampling.logit_bias]
    if not entries:
        return logits
    at, tokens, biases = zip(*entries, strict=True)
    assert all(0 <= token < logits.shape[-1] for token in tokens), "logit_bias names a token outside the vocabulary"
    return logits.at[mx.array(at), mx.array(tokens)].add(mx.array(biases, dtype=mx.float32))


def _penalise(logits: mx.array, rows: Sequence[BatchRow], history: TokenHistory, newest: mx.array | None) -> mx.array:
    places = history.follow(rows, newest)
    assert history.generated is not None
    assert history.prompted is not None
    counts, prompted = history.generated[places], history.prompted[places]
    repetition = mx.array([row.sampling.repetition_penalty for row in rows], dtype=mx.float32)[:, None]
    presence = mx.array([row.sampling.presence_penalty for row in rows], dtype=mx.float32)[:, None]
    frequency = mx.array([row.sampling.frequency_penalty for row in rows], dtype=mx.float32)[:, None]
    seen = prompted | (counts > 0)
    logits = mx.where(seen, mx.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - frequency * counts - presence * (counts > 0)
