"""The guides of the rows that have one: masks for their logits, made on the host while the device computes.

Owns: one guide per guided request, kept in step with the tokens that the host knows. Must not know: what a guide allows
and why.

A grammar is compiled in a thread of its own while the prompt is read, so that a large one stops nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import mlx.core as mx
import numpy as np

from engine.batch import BatchRow
from engine.errors import EngineError
from engine.text.guide import AnswerGuide
from engine.text.structured import GrammarCompiler

_SHIFTS = np.arange(32, dtype=np.uint32)


class RowGuides:
    """Guides by request. ``compiler`` None: no row may be guided."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._guides: dict[str, Future[AnswerGuide]] = {}
        self._num_accepted: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def prepare(self, rows: Sequence[BatchRow]) -> None:
        """Start to compile what ``rows`` will need."""
        for row in rows:
            if row.sampling.guided and row.request_id not in self._guides:
                assert self._compiler is not None, "a guided row without a compiler"
                self._guides[row.request_id] = self._threads.submit(AnswerGuide, row.sampling, self._compiler)
                self._num_accepted[row.request_id] = row.num_prompt_tokens

    def constrain(
        self, logits: mx.array, rows: Sequence[tuple[int, BatchRow]]
    ) -> tuple[mx.array, dict[str, EngineError]]:
        """``logits`` fp32 ``[R, V]`` with -inf where a guided row must not go; ``rows`` are pairs of place and row.

        Rows whose guide failed are left alone and returned with their errors.
        """
        guided = [(place, row) for place, row in rows if row.sampling.guided]
        if not guided:
            return logits, {}
        assert self._compiler is not None
        masks = np.zeros((len(guided), self._compiler.mask_width), dtype=np.int32)
        failures: dict[str, EngineError] = {}
        for i, (_, row) in enumerate(guided):
            try:
                guide = self._guides[row.request_id].result()
                self._catch_up(guide, row)
                guide.fill_mask(masks, i)
            except EngineError as error:
                failures[row.request_id] = error
                masks[i] = -1
        at = mx.array(np.array([place for place, _ in guided], dtype=np.int32))
        changed = mx.array(logits)
        changed[at] = mx.where(_unpack(masks, logits.shape[-1]), logits[at], -mx.inf)
        return changed, failures

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the guides of requests that ended or were preempted; they are made again when those come back."""
        for request_id in request_ids:
            self._guides.pop(request_id, None)
            self._num_accepted.pop(request_id, None)

    def close(self) -> None:
        """Let go of the thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _catch_up(self, guide: AnswerGuide, row: BatchRow) -> None:
        assert len(row.token_ids) == row.start + row.num_tokens, "a guided row's newest token is still in flight"
        for token_id in row.token_ids[self._num_accepted[row.request_id] :]:
            guide.accept(token_id)
        self._num_accepted[row.request_id] = len(row.token_ids)


def _unpack(masks: np.ndarray[tuple[int, int], np.dtype[np.int32]], vocab_size: int) -> mx.array:
    """Bits ``[r, ceil(V / 32)]`` as truth values ``[r, V]``, spread out on the device."""
    words = mx.array(masks.view(np.uint32))[:, :, None]
    bits = (words >> mx.array(_SHIFTS)) & mx.array(1, mx.uint32)
    return bits.reshape(len(masks), -1)[:, :vocab_size].astype(mx.bool_)
