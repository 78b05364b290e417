"""Totals since the start.

Owns: counting. Must not know: why anything happened.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from engine.scheduler.request_state import Request

_SMOOTHING = 0.1


@dataclass(slots=True)
class _Totals:
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_refused: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class Counters(_Totals):
    """The totals of ``SchedulerStats``, and the usual length of an answer (None before the first)."""

    usual_output_tokens: float | None = None

    def first_token(self, request: Request) -> None:
        """A prompt has been read, once and for all."""
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_prompt_tokens += request.num_cached_tokens

    def finished(self, request: Request) -> None:
        """An answer is complete."""
        self.num_finished += 1
        usual = self.usual_output_tokens
        number = float(request.num_output_tokens)
        self.usual_output_tokens = number if usual is None else usual + _SMOOTHING * (number - usual)

    def as_stats(self) -> dict[str, int]:
        """The totals by the names of ``SchedulerStats``."""
        totals = asdict(self)
        del totals["usual_output_tokens"]
        return totals
