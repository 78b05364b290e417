"""When an answer is over.

Owns: the stop rules that need token ids and counts only. Must not know: text (stop strings are matched where text is
made, and the scheduler is told that the answer is complete).
"""

from __future__ import annotations

from engine.request import FinishReason
from engine.scheduler.request_state import Request


def finish_reason(request: Request, eos_token_ids: frozenset[int]) -> FinishReason | None:
    """Why the newest token ends the answer, or None. A token that stops at the limit counts as a stop."""
    token_id = request.token_ids[-1]
    sampling = request.asked.sampling
    if token_id in eos_token_ids and not sampling.ignore_eos:
        return FinishReason.STOP
    if token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    if len(request.token_ids) >= request.max_tokens_total:
        return FinishReason.LENGTH
    return None
