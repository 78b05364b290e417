"""Sampling of a GPU step: in the compiled step where the kernel does it all, beside it where rows ask for more.

Owns: bias, penalties and logprobs of the rows that ask for them, with the newest token still on the device; the plain
sampler's road where the sampling kernel is off. Must not know: the model, when a step runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engine.batch import BatchRow
from engine.mlx_backend.filters import Filters, keep_allowed
from engine.mlx_backend.gpu_inputs import HostStep
from engine.mlx_backend.gpu_model import GpuModel, remember
from engine.mlx_backend.noise import gumbel
from engine.mlx_backend.penalties import TokenHistory, adjust, is_adjusted
from engine.mlx_backend.sampler import Samples, logprobs_of


class GpuSampler:
    """Samples for up to ``num_slots`` requests at a time. Use from one thread."""

    def __init__(self, num_slots: int, vocab_size_tokens: int) -> None:
        self._history = TokenHistory(num_slots, vocab_size_tokens)
        # One place more than there are slots: rows of padding put their token there.
        self.last_tokens = mx.zeros((num_slots + 1,), mx.int32)

    def sample(self, model: GpuModel, host: HostStep) -> Samples:
        """Run ``model`` on ``host`` and choose tokens, lazily; the newest ones stay in ``last_tokens`` by slot."""
        rows = [(i, row) for i, row in enumerate(host.head_rows) if row is not None and row.samples]
        asks_more = any(is_adjusted(row.sampling) or row.sampling.num_logprobs is not None for _, row in rows)
        if model.samples and not asks_more:
            tokens, broken, self.last_tokens = model.tokens(host, self.last_tokens)
            return _of_rows(rows, tokens, broken)
        logits = model.logits(host, self.last_tokens).astype(mx.float32)
        arrays = host.shape.layout.unpack(host.upload)
        adjusted = self._adjust(logits, host.head_rows)
        tokens, broken = model.draw(adjusted, arrays) if model.samples else draw_plainly(adjusted, arrays)
        self.last_tokens = remember(self.last_tokens, arrays["head_slots"], tokens)
        at = mx.array([i for i, _ in rows], mx.int32)
        logprobs = logprobs_of(logits[at], tokens[at], [row for _, row in rows])
        return _of_rows(rows, tokens, broken, logprobs)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop what is kept for requests that ended or were preempted."""
        self._history.forget(request_ids)

    def state(self) -> list[mx.array]:
        """Arrays that live on into the next step."""
        return [self.last_tokens, *self._history.state()]

    def _adjust(self, logits: mx.array, head_rows: Sequence[BatchRow | None]) -> mx.array:
        chosen = [
            (i, row)
            for i, row in enumerate(head_rows)
            if row is not None and row.samples and is_adjusted(row.sampling)
        ]
        if not chosen:
            return logits
        rows = [row for _, row in chosen]
        at = mx.array([i for i, _ in chosen], mx.int32)
        newest = self.last_tokens[mx.array([row.slot for row in rows], mx.int32)]
        changed = mx.array(logits)
        changed[at] = adjust(logits[at], rows, self._history, newest)
        return changed


def draw_plainly(logits: mx.array, arrays: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
    """What the sampling kernel computes, in plain MLX operations: tokens and marks of broken rows, int32 [R]."""
    settings, V = arrays["settings"].view(mx.float32), logits.shape[-1]
    temperature = settings[0][:, None]
    total = mx.sum(logits, axis=-1)
    broken = mx.isnan(total) | (total == mx.inf)
    scores = (logits - mx.max(logits, axis=-1, keepdims=True)) / mx.where(temperature > 0, temperature, 1.0)
    filters = Filters(np.array(arrays["limits"]), np.array(settings[1]), np.array(settings[2]))
    if not filters.is_off(V):
        scores = keep_allowed(scores, filters, host_may_wait=False)
    keys = arrays["keys"].view(mx.uint32).T
    noisy = mx.where(temperature > 0, scores + gumbel(keys, V), logits)
    return mx.argmax(noisy, axis=-1).astype(mx.int32), broken.astype(mx.int32)


def _of_rows(rows: list[tuple[int, BatchRow]], tokens: mx.array, broken: mx.array, logprobs: object = None) -> Samples:
    raise AssertionError
