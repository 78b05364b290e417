"""Chooses the next token of every sampling row in one vectorised call.

Owns: the order of the stages (bias and penalties, guides, temperature, filters, noise), greedy rows in the same call,
logprobs on demand, the mark on rows whose logits are no numbers. Must not know: the model, the pool, when a step runs.

A stage runs if some row needs it, and only on the rows that do: a row's token never depends on its batch-mates.
Logprobs are those of the model's own distribution, before bias, penalties and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from engine.batch import BatchRow, SampledToken
from engine.errors import EngineError, StepFailedError
from engine.mlx_backend.embeddings import NO_EMBEDDINGS, RowEmbeddings
from engine.mlx_backend.filters import Filters, keep_allowed
from engine.mlx_backend.noise import gumbel, row_keys
from engine.mlx_backend.penalties import TokenHistory, adjust, is_adjusted
from engine.mlx_backend.row_guides import RowGuides
from engine.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobArrays:
    """For the rows ``places`` (positions among the sampling rows): log-probability of the chosen token ``[r]``, and
    ids and log-probabilities of the likeliest ones ``[r, n]``, likeliest first."""

    places: tuple[int, ...]
    chosen: mx.array
    top_ids: mx.array
    top: mx.array


@dataclass(frozen=True, slots=True)
class Samples:
    """A sampling call's result, not evaluated yet: ``tokens`` uint32 ``[R]``, ``broken`` bool ``[R]``.

    ``failures``: rows that cannot go on, whatever their logits. ``embeddings``: of rows that want them.
    """

    rows: tuple[BatchRow, ...]
    tokens: mx.array
    broken: mx.array
    logprobs: LogprobArrays | None
    failures: dict[str, EngineError] = field(default_factory=dict)
    embeddings: RowEmbeddings = NO_EMBEDDINGS

    def arrays(self) -> list[mx.array]:
        """What is to be evaluated with the step."""
        extra = [] if self.logprobs is None else [self.logprobs.chosen, self.logprobs.top_ids, self.logprobs.top]
        return [self.tokens, self.broken, *extra, *self.embeddings.arrays()]

    def read(self) -> tuple[dict[str, SampledToken], dict[str, EngineError]]:
        """Wait for the values: tokens, and failures, by request id."""
        tokens: list[int] = self.tokens.tolist()  # type: ignore[assignment]
        broken: list[bool] = self.broken.tolist()  # type: ignore[assignment]
        details = {} if self.logprobs is None else read_logprobs(self.logprobs, self.rows, tokens)
        embeddings = self.embeddings.read()
        sampled = {
            row.request_id: SampledToken(token, details.get(i), embeddings.get(row.request_id))
            for i, (row, token) in enumerate(zip(self.rows, tokens, strict=True))
            if not broken[i]
        }
        failures: dict[str, EngineError] = {
            row.request_id: StepFailedError("The model's logits for this request are not numbers.")
            for row, is_broken in zip(self.rows, broken, strict=True)
            if is_broken
        } | self.failures
        return {name: token for name, token in sampled.items() if name not in failures}, failures


class Sampler:
    """Samples for up to ``num_slots`` requests at a time. Use from one thread."""

    def __init__(
        self, num_slots: int, vocab_size_tokens: int, *, host_may_wait: bool, guides: RowGuides | None = None
    ) -> None:
        self._vocab_size_tokens = vocab_size_tokens
        self._guides = guides or RowGuides(None)
        self._host_may_wait = host_may_wait
        self._history = TokenHistory(num_slots, vocab_size_tokens)

    def sample(self, logits: mx.array, rows: tuple[BatchRow, ...], newest: mx.array | None = None) -> Samples:
        """Choose from ``logits`` ``[R, V]`` for ``rows``, lazily.

        ``newest`` int32 ``[R]``: each row's newest token, for rows whose newest token the host does not know yet.
        """
        raw = logits.astype(mx.float32)
        total = mx.sum(raw, axis=-1)
        broken = mx.isnan(total) | (total == mx.inf)  # -inf alone is a masked token, which is in order
        adjusted, failures = self._guides.constrain(self._adjust(raw, rows, newest), tuple(enumerate(rows)))
        tokens = mx.argmax(adjusted, axis=-1)
        drawing = [i for i, row in enumerate(rows) if not row.sampling.greedy]
        if drawing:
            at = _index(drawing)
            tokens[at] = self._draw(adjusted[at], [rows[i] for i in drawing])
        return Samples(rows, tokens, broken, logprobs_of(raw, tokens, rows), failures)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop what is kept for requests that ended or were preempted."""
        self._history.forget(request_ids)
        self._guides.forget(request_ids)

    def state(self) -> list[mx.array]:
        """Arrays that live on into the next step."""
        return self._history.state()

    def _adjust(self, logits: mx.array, rows: Sequence[BatchRow], newest: mx.array | None) -> mx.array:
        places = [i for i, row in enumerate(rows) if is_adjusted(row.sampling)]
        if not places:
            return logits
        at = _index(places)
        changed = mx.array(logits)
        changed[at] = adjust(
            logits[at], [rows[i] for i in places], self._history, None if newest is None else newest[at]
        )
        return changed

    def _draw(self, logits: mx.array, rows: Sequence[BatchRow]) -> mx.array:
        V = self._vocab_size_tokens
        params = [row.sampling for row in rows]
        temperature = mx.array([p.temperature for p in params], dtype=mx.float32)[:, None]
        scores = (logits - mx.max(logits, axis=-1, keepdims=True)) / temperature
        filters = Filters(
            top_k=np.array([min(p.top_k or V, V) for p in params]),
            top_p=np.array([p.top_p for p in params], dtype=np.float32),
            min_p=np.array([p.min_p for p in params], dtype=np.float32),
        )
        if not filters.is_off(V):
            scores = keep_allowed(scores, filters, host_may_wait=self._host_may_wait)
        keys = row_keys([row.seed for row in rows], [row.output_index for row in rows])
        return mx.argmax(scores + gumbel(keys, V), axis=-1)


def _index(places: Sequence[int]) -> mx.array:
    return mx.array(np.array(places, dtype=np.int32))


def logprobs_of(raw: mx.array, tokens: mx.array, rows: Sequence[BatchRow]) -> LogprobArrays | None:
    """What the rows that ask for logprobs get; ``raw`` fp32 ``[R, V]`` are the model's logits."""
    places = tuple(i for i, row in enumerate(rows) if row.sampling.num_logprobs is not None)
    if not places:
        return None
    at = _index(places)
    logits = raw[at]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[at][:, None].astype(mx.int32), axis=-1)[:, 0]
    count = max(rows[i].sampling.num_logprobs or 0 for i in places)
    if count == 0:
        empty = mx.zeros((len(places), 0))
        return LogprobArrays(places, chosen, empty.astype(mx.int32), empty)
    ids = mx.argpartition(-logprobs, count - 1, axis=-1)[:, :count]
    top = mx.take_along_axis(logprobs, ids, axis=-1)
    order = mx.argsort(-top, axis=-1)
    return LogprobArrays(
        places, chosen, mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(top, order, axis=-1)
    )


def read_logprobs(arrays: LogprobArrays, rows: Sequence[BatchRow], tokens: list[int]) -> dict[int, TokenLogprobs]:
    """Logprobs by place among ``rows``; waits for the values."""
    chosen, ids, top = np.array(arrays.chosen), np.array(arrays.top_ids), np.array(arrays.top)
    details = {}
    for j, i in enumerate(arrays.places):
        count = rows[i].sampling.num_logprobs or 0
        likeliest = tuple((int(t), float(p)) for t, p in zip(ids[j, :count], top[j, :count], strict=True))
        details[i] = TokenLogprobs(tokens[i], float(chosen[j]), likeliest)
    return details
