"""The record of one finished call. Pure.

Owns: every time and count that is ever told of a call, and how durations follow from marks. Traces, metrics and log
lines are made from this record and from nothing else, so they agree. Must not know: any of them.

    received -- queue -- prefill started -- prefill -- first token -- decode -- finished
                          a pause: preempted .. resumed
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.core.generation import AnswerAccount
from engine.request import FinishReason, Timeline
from serve_app.protocol import GenerateCall

# How vLLM names the ends that have no name in OpenAI's API.
FINISHED_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}
OK = "ok"
# Of a call with thousands of prompts so many answers are told one by one; the sums are of all.
NUM_ANSWERS_TOLD = 32
CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ReplicaName:
    """Which replica: Serve's id for it, Ray's id for its node, and the machine's name."""

    replica_id: str = ""
    node_id: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class TokenGaps:
    """The times between an answer's successive tokens as they left the engine: how many, their sum, the longest."""

    num: int = 0
    sum_s: float = 0.0
    max_s: float = 0.0

    def plus(self, gap_s: float) -> TokenGaps:
        """These and one more."""
        return TokenGaps(self.num + 1, self.sum_s + gap_s, max(self.max_s, gap_s))


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One answer. ``choice``: its number in the call. Times are monotonic seconds of the replica's machine."""

    choice: int
    account: AnswerAccount
    gaps: TokenGaps = TokenGaps()

    @property
    def timeline(self) -> Timeline:
        """The engine's marks."""
        return self.account.timeline

    @property
    def finished_reason(self) -> str:
        """As vLLM's metrics name it: stop, length, abort, error."""
        return FINISHED_REASONS[self.account.finish_reason]

    @property
    def queue_s(self) -> float | None:
        """From arrival to the first step with this answer, or to the end of one that was never computed.

        None where it was computed and nobody has told when that began.
        """
        timeline = self.timeline
        is_computed = timeline.prefill_started_s is not None or timeline.first_token_s is not None
        return _between(timeline.received_s, timeline.prefill_started_s if is_computed else timeline.finished_s)

    @property
    def prefill_s(self) -> float | None:
        """From the first step to the first token."""
        return _between(self.timeline.prefill_started_s, self.timeline.first_token_s)

    @property
    def decode_s(self) -> float | None:
        """From the first token to the end."""
        return _between(self.timeline.first_token_s, self.timeline.finished_s)

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token."""
        return _between(self.timeline.received_s, self.timeline.first_token_s)

    @property
    def e2e_s(self) -> float | None:
        """From arrival to the end."""
        return _between(self.timeline.received_s, self.timeline.finished_s)

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first; None for fewer than two."""
        num = self.account.num_output_tokens
        return self.decode_s / (num - 1) if self.decode_s is not None and num > 1 else None

    @property
    def waited_s(self) -> float:
        """The whole wait, over all reasons."""
        return math.fsum(self.timeline.waited_s.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a log line; durations in seconds, None where a mark was not reached."""
        account, timeline = self.account, self.timeline
        return {
            "choice": self.choice,
            "finish_reason": self.finished_reason,
            "slot": timeline.slot,
            "prompt_tokens": account.num_prompt_tokens,
            "cached_tokens": account.num_cached_tokens,
            "output_tokens": account.num_output_tokens,
            "admitted_s": _between(timeline.received_s, timeline.admitted_s),
            "queue_s": self.queue_s,
            "prefill_s": self.prefill_s,
            "ttft_s": self.ttft_s,
            "decode_s": self.decode_s,
            "e2e_s": self.e2e_s,
            "waited_s": {str(reason): seconds for reason, seconds in timeline.waited_s.items()},
            "preemptions": timeline.num_preemptions,
            "longest_gap_s": self.gaps.max_s if self.gaps.num else None,
        }


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One finished call. ``outcome``: "ok", "cancelled" (its caller left) or the error's code.

    ``received_s`` and ``finished_s`` are monotonic; ``epoch_s`` added to either gives Unix time. ``texts``: the
    answers, by choice, only where that was switched on.
    """

    call: GenerateCall
    replica: ReplicaName
    received_s: float
    finished_s: float
    epoch_s: float
    outcome: str
    answers: tuple[AnswerRecord, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def operation(self) -> str:
        """The kind of call, in the words of the GenAI conventions."""
        if self.call.embeds:
            return "embeddings"
        return "chat" if self.call.messages else "text_completion"

    @property
    def duration_s(self) -> float:
        """From the call's arrival at the replica to its end."""
        return self.finished_s - self.received_s

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; one that is answered n times counts once."""
        return sum(answer.account.num_prompt_tokens for answer in self._firsts)

    @property
    def num_cached_tokens(self) -> int:
        """Those of them that the prefix cache had for the first answer to each."""
        return sum(answer.account.num_cached_tokens for answer in self._firsts)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.account.num_output_tokens for answer in self.answers)

    @property
    def ttft_s(self) -> float | None:
        """From the call's arrival to the first token of any answer."""
        marks = [t.first_token_s for answer in self.answers if (t := answer.timeline).first_token_s is not None]
        return min(marks) - self.received_s if marks else None

    @property
    def num_preemptions(self) -> int:
        """Over all answers."""
        return sum(answer.timeline.num_preemptions for answer in self.answers)

    @property
    def waited_s(self) -> Mapping[str, float]:
        """Seconds by reason, over all answers."""
        waited: dict[str, float] = {}
        for answer in self.answers:
            for reason, seconds in answer.timeline.waited_s.items():
                waited[str(reason)] = waited.get(str(reason), 0.0) + seconds
        return waited

    @property
    def _firsts(self) -> list[AnswerRecord]:
        return [answer for answer in self.answers if answer.choice % self.call.n == 0]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a log line."""
        call, route = self.call, self.call.route
        return {
            "request_id": call.request_id,
            "client_request_id": call.client_request_id,
            "key": call.key_name,
            "model": call.model,
            "operation": self.operation,
            "outcome": self.outcome,
            "host": self.replica.host,
            "replica": self.replica.replica_id,
            "trace_id": _trace_id(call.trace_context),
            "route": None if route is None else {"reason": route.reason, "replica": route.replica},
            "received_unix_s": round(self.received_s + self.epoch_s, 6),
            "duration_s": self.duration_s,
            "ttft_s": self.ttft_s,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "preemptions": self.num_preemptions,
            "waited_s": dict(self.waited_s),
            "num_answers": len(self.answers),
            "answers": [answer.as_dict() for answer in self.answers[:NUM_ANSWERS_TOLD]],
        }


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


def _trace_id(context: Mapping[str, str]) -> str:
    parts = context.get("traceparent", "").split("-")
    return parts[1] if len(parts) == 4 else ""
