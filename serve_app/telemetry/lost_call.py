"""The record of a call that was lost with its replica, made by who waited for its answer. Pure: time is an argument.

Owns: what is noted of an answer on its way for this case, and which marks follow from it. Must not know: HTTP, who is
told. Every other call has its record from the replica, which knows more.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.generation import AnswerAccount
from engine.request import FinishReason, Timeline
from serve_app.protocol import ChoiceDelta, Deltas, GenerateCall, Usage
from serve_app.telemetry.record import AnswerRecord, CallRecord, ReplicaName

LOST = "replica_lost"
_FINISH_REASONS = {"stop": FinishReason.STOP, "tool_calls": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(slots=True)
class _Answer:
    first_token_s: float
    num_output_tokens: int = 0
    finish_reason: FinishReason = FinishReason.ERROR
    finished_s: float | None = None

    def add(self, delta: ChoiceDelta, now_s: float) -> None:
        self.num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.finish_reason, self.finished_s = _FINISH_REASONS[delta.finish_reason], now_s


class CallTrail:
    """One call as seen from outside of its replica. Times are monotonic seconds."""

    def __init__(self, call: GenerateCall, sent_s: float) -> None:
        self.call = call
        self._sent_s = sent_s
        self._answers: dict[int, _Answer] = {}
        self._prompt = Usage()

    def note(self, message: Deltas, now_s: float) -> None:
        """A message of the answer has come."""
        self._prompt = message.prompt_usage or self._prompt
        for delta in message.choices:
            self._answers.setdefault(delta.index, _Answer(now_s)).add(delta, now_s)

    def record(self, call: GenerateCall, replica_id: str, now_s: float, epoch_s: float) -> CallRecord:
        """The record of the call, which is lost. ``call``: with its route, where that is known.

        Answers of which nothing has come are not in it. When a slot was given is not known out here.
        """
        answers = tuple(
            AnswerRecord(choice, self._account(choice, answer, now_s))
            for choice, answer in sorted(self._answers.items())
        )
        return CallRecord(call, ReplicaName(replica_id), self._sent_s, now_s, epoch_s, LOST, answers)

    def _account(self, choice: int, answer: _Answer, now_s: float) -> AnswerAccount:
        timeline = Timeline(
            self._sent_s,
            first_token_s=answer.first_token_s,
            finished_s=now_s if answer.finished_s is None else answer.finished_s,
        )
        return AnswerAccount(
            index=choice % self.call.n,
            finish_reason=answer.finish_reason,
            num_prompt_tokens=self._prompt.num_prompt_tokens,
            num_output_tokens=answer.num_output_tokens,
            num_cached_tokens=self._prompt.num_cached_tokens,
            timeline=timeline,
        )
