"""From a load's records to its figures.

Owns: reading the answers, what counts as failed, and the summary of one load. Must not know: sockets, files or tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.bench.client import Answer, read_answer
from serve_app.bench.load import CallRecord, LoadRecord
from serve_app.latency import LoadSummary, RequestTiming, ServiceLevel, Summary, summarize, summarize_load


@dataclass(frozen=True, slots=True)
class CallResult:
    """One request, read. ``timing`` is None when it failed; its times count from the start of the load."""

    session_index: int
    call_index: int
    class_name: str
    client: int | None
    num_tokens_asked: int
    lateness_s: float
    timing: RequestTiming | None
    finish_reason: str | None
    num_cached_tokens: int | None
    counted_by: str
    text: str
    error: str | None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One load, read. ``full_load_tokens_per_s``: output while every closed-loop client was busy, without ramp-down.

    ``client_lag_s``: lateness of the client's own timers. ``num_wrong_length``: answers of another length than asked.
    """

    summary: LoadSummary
    full_load_tokens_per_s: float | None
    client_lag_s: Summary | None
    lateness_s: Summary | None
    num_wrong_length: int
    num_cached_tokens: int | None
    errors: tuple[tuple[str, int], ...]
    cut_off: bool
    calls: tuple[CallResult, ...]


def read_load(record: LoadRecord, level: ServiceLevel | None = None) -> LoadResult:
    """Read every answer of a load and summarise it."""
    calls = tuple(_read_call(call, record.started_s) for call in record.calls)
    answered = [call for call in calls if call.timing is not None]
    timings = [call.timing for call in answered if call.timing is not None]
    duration_s = max(record.ended_s - record.started_s, 1e-9)
    cached = [call.num_cached_tokens for call in answered if call.num_cached_tokens is not None]
    errors = Counter(call.error for call in calls if call.error is not None)
    return LoadResult(
        summary=summarize_load(timings, len(calls) - len(answered), duration_s, level),
        full_load_tokens_per_s=_full_load_tokens_per_s(calls),
        client_lag_s=summarize(record.lags_s),
        lateness_s=summarize(call.lateness_s for call in calls),
        num_wrong_length=sum(
            call.timing is not None and call.timing.num_output_tokens != call.num_tokens_asked for call in calls
        ),
        num_cached_tokens=sum(cached) if cached else None,
        errors=tuple(errors.most_common()),
        cut_off=record.cut_off,
        calls=calls,
    )


def _read_call(call: CallRecord, origin_s: float) -> CallResult:
    answer = read_answer(call.stream)
    return CallResult(
        session_index=call.session_index,
        call_index=call.call_index,
        class_name=call.class_name,
        client=call.client,
        num_tokens_asked=call.plan.output_tokens,
        lateness_s=call.stream.sent_s - call.due_s,
        timing=_timing(call, answer, origin_s) if answer.error is None else None,
        finish_reason=answer.finish_reason,
        num_cached_tokens=answer.num_cached_tokens,
        counted_by="chunks" if answer.num_output_tokens is None else "usage",
        text=answer.text,
        error=answer.error,
    )


def _timing(call: CallRecord, answer: Answer, origin_s: float) -> RequestTiming:
    num_prompt, num_output = answer.num_prompt_tokens, answer.num_output_tokens
    return RequestTiming(
        sent_s=call.stream.sent_s - origin_s,
        chunk_times_s=tuple(moment - origin_s for moment in answer.chunk_times_s),
        num_prompt_tokens=call.plan.prompt_tokens if num_prompt is None else num_prompt,
        num_output_tokens=len(answer.chunk_times_s) if num_output is None else num_output,
        queue_s=answer.queue_s,
    )


def _full_load_tokens_per_s(calls: Sequence[CallResult]) -> float | None:
    """Output tokens per second up to the moment at which the first client had nothing left to do.

    A chunk's tokens are its answer's tokens divided by its chunks. None in an open loop or when a request failed:
    there is no such window then.
    """
    ended_s: dict[int, float] = {}
    for call in calls:
        if call.client is None or call.timing is None:
            return None
        ended_s[call.client] = max(ended_s.get(call.client, 0.0), call.timing.chunk_times_s[-1])
    window_s = min(ended_s.values(), default=0.0)
    if window_s <= 0:
        return None
    num_tokens = 0.0
    for call in calls:
        if call.timing is not None:
            times_s = call.timing.chunk_times_s
            num_inside = sum(moment <= window_s for moment in times_s)
            num_tokens += call.timing.num_output_tokens * num_inside / len(times_s)
    return num_tokens / window_s
