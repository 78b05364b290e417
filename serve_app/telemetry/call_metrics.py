"""What a replica counts of its calls, for Prometheus: vLLM's names where the meaning is vLLM's, our own elsewhere.

Owns: the metrics that are made from tokens and records, and their buckets. Must not know: the engine's own figures
(engine_metrics.py), how metrics leave the process. Labels are few and bounded: no request, user or text is one.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from engine.request import WaitReason
from serve_app.latency import E2E_BUCKETS_S, TOKEN_GAP_BUCKETS_S, TTFT_BUCKETS_S
from serve_app.telemetry.families import Family, families_of
from serve_app.telemetry.record import FINISHED_REASONS, AnswerRecord, CallRecord
from serve_app.telemetry.recorder import Tokens

# Reading a long prompt takes seconds to minutes on a Mac.
PHASE_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_CHOICE_BUCKETS = (1, 2, 5, 10, 20)


class CallMetrics:
    """A sink with a registry of its own. ``max_model_len``: the longest that a prompt or an answer can be."""

    def __init__(self, max_model_len: int) -> None:
        self._registry = CollectorRegistry()
        tokens = _one_two_five(max_model_len)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of answers that have begun.")
        self._output_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._cached_tokens = self._counter("vllm:prefix_cache_hits", "Prompt tokens that the prefix cache had.")
        self._asked_tokens = self._counter("vllm:prefix_cache_queries", "Prompt tokens that it was asked for.")
        self._finished = self._counter("vllm:request_success", "Answers that ended, by why.", "finished_reason")
        self._gap = self._histogram("vllm:inter_token_latency_seconds", "Between tokens.", TOKEN_GAP_BUCKETS_S)
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", E2E_BUCKETS_S)
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", TOKEN_GAP_BUCKETS_S
        )
        self._queue = self._phase("vllm:request_queue_time_seconds", "Arrival to the first step.")
        self._prefill = self._phase("vllm:request_prefill_time_seconds", "First step to first token.")
        self._decode = self._phase("vllm:request_decode_time_seconds", "First token to last.")
        self._inference = self._phase("vllm:request_inference_time_seconds", "First step to last token.")
        self._prompt_length = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of an answer.", tokens)
        self._answer_length = self._histogram("vllm:request_generation_tokens", "Tokens of an answer.", tokens)
        self._max_tokens = self._histogram("vllm:request_params_max_tokens", "Tokens asked for at most.", tokens)
        self._n = self._histogram("vllm:request_params_n", "Answers asked for to a prompt.", _CHOICE_BUCKETS)
        self._calls = self._counter("metalslots_calls", "Calls that ended: ok, cancelled, or an error.", "outcome")
        self._waited = self._counter("metalslots_wait_seconds", "Time that answers waited, by for what.", "reason")
        self._routes = self._counter("metalslots_routing_decisions", "Why calls came to this replica.", "reason")
        for reason in WaitReason:
            self._waited.labels(reason)
        for finished_reason in FINISHED_REASONS.values():
            self._finished.labels(finished_reason)

    def tokens(self, tokens: Tokens) -> None:
        """Count new tokens and the gaps before them."""
        self._output_tokens.inc(tokens.num_output)
        for gap_s in tokens.gaps_s:
            self._gap.observe(gap_s)
        for num_prompt, num_cached in tokens.first_of:
            self._prompt_tokens.inc(num_prompt)
            self._asked_tokens.inc(num_prompt)
            self._cached_tokens.inc(num_cached)

    def finished(self, record: CallRecord) -> None:
        """Count a call and its answers."""
        self._calls.labels(record.outcome).inc()
        if record.call.route is not None:
            self._routes.labels(record.call.route.reason).inc()
        if record.answers:
            self._n.observe(record.call.n)
            if record.call.max_tokens is not None:
                self._max_tokens.observe(record.call.max_tokens)
        for answer in record.answers:
            self._answer(answer)

    def families(self) -> list[Family]:
        """Everything, as it travels."""
        return families_of(self._registry)

    def _answer(self, answer: AnswerRecord) -> None:
        for reason, seconds in answer.timeline.waited_s.items():
            self._waited.labels(reason).inc(seconds)
        if answer.timeline.admitted_s is None:
            # Refused, or given up before it had a slot: it says nothing of how long answers take.
            return
        self._finished.labels(answer.finished_reason).inc()
        self._prompt_length.observe(answer.account.num_prompt_tokens)
        self._answer_length.observe(answer.account.num_output_tokens)
        inference_s = None
        if answer.prefill_s is not None and answer.decode_s is not None:
            inference_s = answer.prefill_s + answer.decode_s
        for histogram, value in (
            (self._ttft, answer.ttft_s),
            (self._e2e, answer.e2e_s),
            (self._tpot, answer.tpot_s),
            (self._queue, answer.queue_s),
            (self._prefill, answer.prefill_s),
            (self._decode, answer.decode_s),
            (self._inference, inference_s),
        ):
            if value is not None:
                histogram.observe(value)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)

    def _phase(self, name: str, text: str) -> Histogram:
        return self._histogram(name, text, PHASE_BUCKETS_S)


def _one_two_five(largest: int) -> list[float]:
    """1, 2, 5, 10, 20, ... up to ``largest``: the bounds that vLLM uses for counts of tokens."""
    bounds = (digit * 10.0**power for power in range(9) for digit in (1, 2, 5))
    return [bound for bound in bounds if bound <= max(1, largest)]
