"""A finished call as spans, by the GenAI semantic conventions.

Owns: names and attributes. Must not know: where spans go, or what is still running: a call's spans are made from its
record when it is over, with the record's times.

    POST /v1/chat/completions      the ingress (serve_app/ingress/observing.py)
      route                        the router's choice, the same
      chat demo                    the replica: this call
        queue  prefill  decode     an answer; after a preemption another `queue` until it computes again
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context

from engine.request import SamplingParams, WaitReason
from serve_app.telemetry.record import CANCELLED, NUM_ANSWERS_TOLD, OK, AnswerRecord, CallRecord
from serve_app.telemetry.recorder import Tokens
from serve_app.telemetry.tracing import context_from

PROVIDER = "metalslots"
Value = str | bool | int | float | list[str]


class SpanSink:
    """Makes the spans of every record."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def tokens(self, tokens: Tokens) -> None:
        """Nothing: spans are made of whole calls."""

    def finished(self, record: CallRecord) -> None:
        """Make the call's span and those of its answers."""
        clock = _Clock(record.epoch_s)
        span = self._tracer.start_span(
            f"{record.operation} {record.call.model}",
            context=context_from(record.call.trace_context),
            kind=SpanKind.SERVER,
            attributes=_call_attributes(record),
            start_time=clock.ns(record.received_s),
        )
        if span.is_recording():
            if record.outcome not in (OK, CANCELLED):
                span.set_attribute(ERROR_TYPE, record.outcome)
                span.set_status(Status(StatusCode.ERROR))
            parent = set_span_in_context(span)
            for answer in record.answers[:NUM_ANSWERS_TOLD]:
                self._answer(answer, parent, clock)
        span.end(clock.ns(record.finished_s))

    def _answer(self, answer: AnswerRecord, parent: Context, clock: _Clock) -> None:
        timeline, account = answer.timeline, answer.account
        end_s = timeline.finished_s or timeline.received_s
        spans = _Spans(self._tracer, parent, clock, answer)
        started_s, first_token_s = timeline.prefill_started_s, timeline.first_token_s
        if answer.queue_s is not None:
            spans.add("queue", timeline.received_s, timeline.received_s + answer.queue_s, _waits(timeline.waited_s))
        if started_s is not None:
            counts = {"prompt_tokens": account.num_prompt_tokens, "cached_tokens": account.num_cached_tokens}
            spans.add("prefill", started_s, first_token_s or end_s, counts)
        if first_token_s is not None:
            counts = {"output_tokens": account.num_output_tokens, "preemptions": timeline.num_preemptions}
            spans.add("decode", first_token_s, end_s, {**counts, "longest_gap_s": answer.gaps.max_s})
        for pause in timeline.pauses:
            spans.add("queue", pause.preempted_s, pause.resumed_s or end_s, {"resumes": True})


@dataclass(frozen=True, slots=True)
class _Clock:
    """The record's monotonic seconds as Unix nanoseconds."""

    epoch_s: float

    def ns(self, at_s: float) -> int:
        return round((self.epoch_s + at_s) * 1e9)


@dataclass(frozen=True, slots=True)
class _Spans:
    """Makes spans below one call's, all with one answer's number and slot."""

    tracer: Tracer
    parent: Context
    clock: _Clock
    answer: AnswerRecord

    def add(self, name: str, start_s: float, end_s: float, more: Mapping[str, Value]) -> None:
        attributes: dict[str, Value] = {"metalslots.choice": self.answer.choice}
        if self.answer.timeline.slot is not None:
            attributes["metalslots.slot"] = self.answer.timeline.slot
        attributes.update((f"metalslots.{key}", value) for key, value in more.items())
        span = self.tracer.start_span(name, self.parent, attributes=attributes, start_time=self.clock.ns(start_s))
        span.end(self.clock.ns(end_s))


def _waits(waited_s: Mapping[WaitReason, float] | Mapping[str, float]) -> dict[str, Value]:
    return {f"waited.{reason}_s": seconds for reason, seconds in waited_s.items()}


def _call_attributes(record: CallRecord) -> dict[str, Value]:
    call = record.call
    found: dict[str, Value | None] = {
        gen_ai.GEN_AI_OPERATION_NAME: record.operation,
        gen_ai.GEN_AI_PROVIDER_NAME: PROVIDER,
        gen_ai.GEN_AI_REQUEST_MODEL: call.model,
        gen_ai.GEN_AI_RESPONSE_MODEL: call.model,
        gen_ai.GEN_AI_RESPONSE_ID: call.request_id,
        gen_ai.GEN_AI_CONVERSATION_ID: call.session_key or None,
        gen_ai.GEN_AI_USAGE_INPUT_TOKENS: record.num_prompt_tokens,
        gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: record.num_output_tokens,
        gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: record.num_cached_tokens,
        gen_ai.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: record.ttft_s,
        gen_ai.GEN_AI_RESPONSE_FINISH_REASONS: _finish_reasons(record) or None,
        "metalslots.outcome": record.outcome,
        "metalslots.key": call.key_name or None,
        "metalslots.replica": record.replica.replica_id,
        "metalslots.host": record.replica.host,
        "metalslots.preemptions": record.num_preemptions,
        "metalslots.route.reason": call.route.reason if call.route else None,
    }
    found |= _sampling_attributes(call.sampling, call.max_tokens, call.n)
    found |= {f"metalslots.{name}": value for name, value in _waits(record.waited_s).items()}
    return {name: value for name, value in found.items() if value is not None}


def _finish_reasons(record: CallRecord) -> list[str]:
    return [answer.finished_reason for answer in record.answers[:NUM_ANSWERS_TOLD]]


def _sampling_attributes(sampling: SamplingParams, max_tokens: int | None, n: int) -> dict[str, Value | None]:
    return {
        gen_ai.GEN_AI_REQUEST_CHOICE_COUNT: n if n != 1 else None,
        gen_ai.GEN_AI_REQUEST_MAX_TOKENS: max_tokens,
        gen_ai.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        gen_ai.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        gen_ai.GEN_AI_REQUEST_TOP_K: sampling.top_k or None,
        gen_ai.GEN_AI_REQUEST_SEED: sampling.seed,
        gen_ai.GEN_AI_REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty or None,
        gen_ai.GEN_AI_REQUEST_PRESENCE_PENALTY: sampling.presence_penalty or None,
    }
