"""Sampling of a GPU step: in the compiled step where the kernel does it all, beside it where rows ask for more.

Owns: bias, penalties, guides and logprobs of the rows that ask for them, with the newest token still on the device; the
plain road where the sampling kernel is off. Must not know: the model's inside, when a step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from engine.batch import BatchRow, SampledToken
from engine.errors import EngineError, StepFailedError
from engine.mlx_backend.embeddings import NO_EMBEDDINGS, RowEmbeddings, embeddings_of
from engine.mlx_backend.filters import Filters, keep_allowed
from engine.mlx_backend.gpu_inputs import HostStep
from engine.mlx_backend.gpu_model import GpuModel, remember
from engine.mlx_backend.kernels.sampling import SampleKernel
from engine.mlx_backend.noise import gumbel
from engine.mlx_backend.penalties import TokenHistory, adjust, is_adjusted
from engine.mlx_backend.row_guides import RowGuides
from engine.mlx_backend.sampler import LogprobArrays, logprobs_of, read_logprobs
from engine.request import SamplingParams

# MLX's CUDA backend keeps what the host has read in managed memory, and gives that to the next array of like size; a
# kernel that meets such pages waits 40 to 130 us. What the host reads is made larger than a step's own results.
_FILLING = 1024

Rows = tuple[tuple[int, BatchRow], ...]


@dataclass(frozen=True, slots=True)
class GpuSamples:
    """A step's result, perhaps not computed yet. ``rows``: the sampling rows and their places among ``num_heads``
    tokens, which are the first of ``results`` int32 [2 num_heads or more], before as many marks of broken rows.
    ``logprobs`` are counted by ``rows``. ``failures``: rows that cannot go on."""

    rows: Rows
    num_heads: int
    results: mx.array
    logprobs: LogprobArrays | None = None
    failures: dict[str, EngineError] = field(default_factory=dict)
    embeddings: RowEmbeddings = NO_EMBEDDINGS

    def arrays(self) -> list[mx.array]:
        """What is to be evaluated with the step."""
        extra = [] if self.logprobs is None else [self.logprobs.chosen, self.logprobs.top_ids, self.logprobs.top]
        return [self.results, *extra, *self.embeddings.arrays()]

    def read(self) -> tuple[dict[str, SampledToken], dict[str, EngineError]]:
        """Wait for the values: tokens, and failures, by request id."""
        results = np.array(self.results)
        broken = results[self.num_heads :]
        tokens = [int(results[place]) for place, _ in self.rows]
        details = {}
        if self.logprobs is not None:
            details = read_logprobs(self.logprobs, [row for _, row in self.rows], tokens)
        embeddings = self.embeddings.read()
        sampled: dict[str, SampledToken] = {}
        failures = dict(self.failures)
        for i, (place, row) in enumerate(self.rows):
            if row.request_id in failures:
                continue
            if broken[place]:
                failures[row.request_id] = StepFailedError("The model's logits for this request are not numbers.")
            else:
                embedding = embeddings.get(row.request_id)
                sampled[row.request_id] = SampledToken(tokens[i], details.get(i), embedding)
        return sampled, failures


class GpuSampler:
    """Samples for up to ``num_slots`` requests at a time. Use from one thread."""

    def __init__(self, num_slots: int, vocab_size_tokens: int, guides: RowGuides | None = None) -> None:
        self._filling = mx.zeros((_FILLING,), mx.int32)
        self._guides = guides or RowGuides(None)
        self._history = TokenHistory(num_slots, vocab_size_tokens)
        # One place more than there are slots: rows of padding put their token there.
        self.last_tokens = mx.zeros((num_slots + 1,), mx.int32)

    def sample(self, model: GpuModel, host: HostStep) -> GpuSamples:
        """Run ``model`` on ``host`` and choose tokens, lazily; the newest ones stay in ``last_tokens`` by slot."""
        rows = tuple((i, row) for i, row in enumerate(host.head_rows) if row is not None and row.samples)
        asks_more = any(row.embeds or _asks_more(row.sampling) for _, row in rows)
        if model.sampling is not None and not asks_more:
            tokens, broken, self.last_tokens = model.tokens(host, self.last_tokens)
            return GpuSamples(rows, len(host.head_rows), self._for_the_host(tokens, broken))
        raw, hidden = model.logits(host, self.last_tokens)
        logits = raw.astype(mx.float32)
        allowed, failures = self._guides.constrain(self._adjust(logits, rows), rows)
        tokens, broken = draw(allowed, host, model.sampling)
        at = mx.array([place for place, _ in rows], mx.int32)
        logprobs = logprobs_of(logits[at], tokens[at], [row for _, row in rows]) if rows else None
        head_slots = host.shape.layout.unpack(host.upload)["head_slots"]
        self.last_tokens = remember(self.last_tokens, head_slots, tokens)
        results = self._for_the_host(tokens, broken)
        return GpuSamples(rows, len(host.head_rows), results, logprobs, failures, embeddings_of(hidden, rows))

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop what is kept for requests that ended or were preempted."""
        self._history.forget(request_ids)
        self._guides.forget(request_ids)

    def state(self) -> list[mx.array]:
        """Arrays that live on into the next step."""
        return [self.last_tokens, *self._history.state()]

    def _for_the_host(self, tokens: mx.array, broken: mx.array) -> mx.array:
        return mx.concatenate([tokens, broken, self._filling])

    def _adjust(self, logits: mx.array, rows: Rows) -> mx.array:
        adjusted = [(place, row) for place, row in rows if is_adjusted(row.sampling)]
        if not adjusted:
            return logits
        at = mx.array([place for place, _ in adjusted], mx.int32)
        newest = self.last_tokens[mx.array([row.slot for _, row in adjusted], mx.int32)]
        changed = mx.array(logits)
        changed[at] = adjust(logits[at], [row for _, row in adjusted], self._history, newest)
        return changed


def _asks_more(sampling: SamplingParams) -> bool:
    return is_adjusted(sampling) or sampling.guided or sampling.num_logprobs is not None


def draw(logits: mx.array, host: HostStep, kernel: SampleKernel | None) -> tuple[mx.array, mx.array]:
    """Tokens and marks of broken rows, int32 [R], for fp32 ``logits`` [R, V]; without ``kernel``, in plain MLX."""
    arrays = host.shape.layout.unpack(host.upload)
    settings = arrays["settings"].view(mx.float32)
    if kernel is not None:
        return kernel(logits, settings, arrays["limits"], arrays["keys"])
    V = logits.shape[-1]
    temperature = settings[0][:, None]
    total = mx.sum(logits, axis=-1)
    broken = mx.isnan(total) | (total == mx.inf)
    scores = (logits - mx.max(logits, axis=-1, keepdims=True)) / mx.where(temperature > 0, temperature, 1.0)
    filters = Filters(host.limits.astype(np.int64), host.settings[1], host.settings[2])
    if not filters.is_off(V):
        scores = keep_allowed(scores, filters, host_may_wait=False)
    noisy = mx.where(temperature > 0, scores + gumbel(arrays["keys"].view(mx.uint32).T, V), logits)
    return mx.argmax(noisy, axis=-1).astype(mx.int32), broken.astype(mx.int32)
