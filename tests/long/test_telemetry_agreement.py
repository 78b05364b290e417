"""A scripted mix of calls over a real engine: its traces, metrics and log lines tell the same of every call."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.core.async_engine import AsyncEngine
from engine.core.engine_core import EngineCore
from engine.errors import ContextLengthError, DeadlineExceededError
from engine.request import SamplingParams
from serve_app.protocol import GenerateCall
from serve_app.replica.calls import CallRunner
from serve_app.telemetry.families import families_of
from serve_app.telemetry.logs import CALLS, JsonFormatter, LogConfig
from serve_app.telemetry.observer import ReplicaObserver
from serve_app.telemetry.tracing import Tracing
from tests.core_fakes import ChainRunner, answer_text, letter_tokenizer, make_core, until
from tests.telemetry_samples import REPLICA, ROUTE, values_of

MAX_GAP_S = 5e-6  # spans keep nanoseconds since 1970 as whole numbers made from floats
PHASES = ("queue", "prefill", "decode")
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@dataclass
class Watched:
    """A replica's inside with everything that watches it."""

    runner: CallRunner
    engine: AsyncEngine
    observer: ReplicaObserver
    exporter: InMemorySpanExporter
    log: _Lines

    async def ask(self, call: GenerateCall, num_messages: int | None = None) -> None:
        """Make a call, and leave after so many messages."""
        num = 0
        async with aclosing(self.runner.generate(call)) as messages:
            async for _ in messages:
                num += 1
                if num == num_messages:
                    return

    def values(self) -> dict[str, float]:
        """The metrics made from calls."""
        return values_of(families_of(self.observer._metrics._registry))

    def children(self, span: ReadableSpan) -> list[ReadableSpan]:
        """The spans below ``span``."""
        spans = self.exporter.get_finished_spans()
        return [child for child in spans if child.parent and child.parent.span_id == span.context.span_id]

    def phases(self, span: ReadableSpan, name: str, choice: int) -> list[ReadableSpan]:
        """Those of them of one answer."""
        found = [child for child in self.children(span) if child.name == name]
        return [child for child in found if (child.attributes or {})["metalslots.choice"] == choice]

    def span_of(self, request_id: str) -> ReadableSpan:
        """The one span of that call."""
        spans = self.exporter.get_finished_spans()
        (found,) = [span for span in spans if (span.attributes or {}).get("gen_ai.response.id") == request_id]
        return found


@pytest.fixture
def lines() -> Iterator[_Lines]:
    handler, logger = _Lines(), logging.getLogger(CALLS)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)


@asynccontextmanager
async def watched(lines: _Lines, build: Callable[[], EngineCore] = make_core) -> AsyncIterator[Watched]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tokenizer = letter_tokenizer()
    engine = AsyncEngine.in_thread(build, tokenizer)
    observer = ReplicaObserver(REPLICA, LogConfig(), 512, Tracing(provider))
    runner = CallRunner(
        engine, tokenizer, flush_interval_s=0.002, max_waiting_requests=64, recorder=observer.recorder(engine.holds)
    )
    await engine.start()
    try:
        yield Watched(runner, engine, observer, exporter, lines)
    finally:
        await engine.close()
        runner.close()


def make_call(request_id: str, *prompts: str, max_tokens: int = 8, **values: Any) -> GenerateCall:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    prompts = prompts or ("hello",)
    return GenerateCall(request_id, "chain", prompts=prompts, sampling=sampling, max_tokens=max_tokens, **values)


def restless_core() -> EngineCore:
    """A core that takes somebody off a slot every so many steps, as the memory guard does under pressure."""
    core = make_core(ChainRunner(step_s=0.001), num_blocks=120, slots=6)
    turns = itertools.count(1)

    def upkeep(now_s: float) -> None:
        if next(turns) % 16 == 0:
            core._scheduler.preempt_one(now_s)

    core._upkeep = upkeep
    return core


async def run_mix(replica: Watched) -> None:
    """Answers of every kind: short and long, several, stopped, left, too long, overdue, refused; some preempted."""
    stop = answer_text(b"stopping", 20)[6:9]
    await replica.ask(make_call("shared", "a long beginning that is read once " * 2, max_tokens=4))
    mix = [
        make_call("traced", "a long beginning that is read once " * 2, trace_context={"traceparent": TRACEPARENT}),
        make_call("routed", route=ROUTE, key_name="anna"),
        make_call("several", "one", "two", n=2, max_tokens=30),
        make_call("stopped", "stopping", max_tokens=200, stop=(stop,)),
        *(make_call(f"crowd-{number}", f"{number} in the crowd", max_tokens=60) for number in range(6)),
    ]
    left = [
        replica.ask(make_call("left", "leaving", max_tokens=300), num_messages=2),
        replica.ask(make_call("left at once", max_tokens=300), num_messages=1),
    ]
    await asyncio.gather(*map(replica.ask, mix), *left)
    with pytest.raises(DeadlineExceededError):
        await replica.ask(make_call("overdue", max_tokens=480, timeout_s=0.2))
    with pytest.raises(ContextLengthError):
        await replica.ask(make_call("too long", "x" * 600))
    await until(replica.engine, lambda: not replica.runner._recorder._open)


async def test_traces_metrics_and_log_lines_agree_on_every_time_and_count(lines: _Lines) -> None:
    async with watched(lines, restless_core) as replica:
        await run_mix(replica)
        by_id = {line["request_id"]: line for line in lines.lines}
        assert len(by_id) == len(lines.lines) == 15, "one line for each call"
        assert by_id["overdue"]["outcome"] == "request_timeout"
        assert by_id["left"]["outcome"] == "cancelled"
        assert by_id["too long"]["outcome"] == "context_length_exceeded"
        for request_id, line in by_id.items():
            check_span(replica, replica.span_of(request_id), line)
        answers = [answer for line in lines.lines for answer in line["answers"]]
        assert sum(answer["preemptions"] for answer in answers) > 0, "the mix has to preempt somebody"
        check_metrics(replica.values(), lines.lines, answers)
        stats = replica.engine.status().scheduler
        assert stats.num_preemptions == sum(line["preemptions"] for line in lines.lines)
        assert stats.num_finished == sum(answer["finish_reason"] in ("stop", "length") for answer in answers)


def check_span(replica: Watched, span: ReadableSpan, line: dict[str, Any]) -> None:
    attributes = span.attributes or {}
    assert attributes["metalslots.outcome"] == line["outcome"]
    assert duration_s(span) == pytest.approx(line["duration_s"], abs=MAX_GAP_S)
    assert (span.start_time or 0) / 1e9 == pytest.approx(line["received_unix_s"], abs=MAX_GAP_S)
    assert attributes["gen_ai.usage.input_tokens"] == line["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == line["output_tokens"]
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == line["cached_tokens"]
    assert attributes["metalslots.preemptions"] == line["preemptions"]
    assert attributes.get("gen_ai.response.time_to_first_chunk") == line["ttft_s"]
    waited = {
        name.removeprefix("metalslots.waited.").removesuffix("_s"): value
        for name, value in attributes.items()
        if name.startswith("metalslots.waited.")
    }
    assert waited == line["waited_s"]
    for answer in line["answers"]:
        check_answer({name: replica.phases(span, name, answer["choice"]) for name in PHASES}, answer)


def check_answer(spans: dict[str, list[ReadableSpan]], answer: dict[str, Any]) -> None:
    queue, *pauses = spans["queue"]
    assert duration_s(queue) == pytest.approx(answer["queue_s"], abs=MAX_GAP_S)
    assert len(pauses) == answer["preemptions"]
    for name, key in (("prefill", "prefill_s"), ("decode", "decode_s")):
        if answer[key] is not None:
            (span,) = spans[name]
            assert duration_s(span) == pytest.approx(answer[key], abs=MAX_GAP_S)
            assert (span.attributes or {})["metalslots.slot"] == answer["slot"]
    waited_s = sum(answer["waited_s"].values())
    visible_s = duration_s(queue) + sum(map(duration_s, pauses))
    # One chunk reads each of these prompts, so what is not seen as a queue is a wait for a block, on the slot.
    assert waited_s >= visible_s - 1e-4
    if not answer["preemptions"] and answer["waited_s"].keys() <= {"slots", "prefill_turn"}:
        assert waited_s == pytest.approx(visible_s, abs=1e-4)
    if answer["decode_s"] is not None:
        total_s = answer["queue_s"] + answer["prefill_s"] + answer["decode_s"]
        assert total_s == pytest.approx(answer["e2e_s"])


def check_metrics(values: dict[str, float], lines: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
    begun = [answer for answer in answers if answer["ttft_s"] is not None]
    let_in = [answer for answer in answers if answer["admitted_s"] is not None]
    assert values["vllm:generation_tokens_total"] == sum(answer["output_tokens"] for answer in answers)
    assert values["vllm:prompt_tokens_total"] == sum(answer["prompt_tokens"] for answer in begun)
    assert values["vllm:prefix_cache_hits_total"] == sum(answer["cached_tokens"] for answer in begun) > 0
    for reason in ("stop", "length", "abort", "error"):
        expected = sum(answer["finish_reason"] == reason for answer in let_in)
        assert values[f'vllm:request_success_total{{finished_reason="{reason}"}}'] == expected > 0
    for outcome in {line["outcome"] for line in lines}:
        expected = sum(line["outcome"] == outcome for line in lines)
        assert values[f'metalslots_calls_total{{outcome="{outcome}"}}'] == expected
    for name, key in (
        ("vllm:time_to_first_token_seconds", "ttft_s"),
        ("vllm:e2e_request_latency_seconds", "e2e_s"),
        ("vllm:request_queue_time_seconds", "queue_s"),
        ("vllm:request_prefill_time_seconds", "prefill_s"),
        ("vllm:request_decode_time_seconds", "decode_s"),
    ):
        times = [answer[key] for answer in let_in if answer[key] is not None]
        assert values[f"{name}_count"] == len(times)
        assert values[f"{name}_sum"] == pytest.approx(sum(times))
    waits = [pair for answer in answers for pair in answer["waited_s"].items()]
    for reason in ("slots", "blocks", "state", "headroom", "prefill_turn"):
        expected_s = sum(seconds for name, seconds in waits if name == reason)
        assert values[f'metalslots_wait_seconds_total{{reason="{reason}"}}'] == pytest.approx(expected_s)


def duration_s(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


async def test_a_call_belongs_to_its_callers_trace(lines: _Lines) -> None:
    async with watched(lines) as replica:
        await replica.ask(make_call("traced", trace_context={"traceparent": TRACEPARENT}))
        await replica.ask(make_call("untraced"))
        await replica.ask(make_call("unsampled", trace_context={"traceparent": TRACEPARENT[:-1] + "0"}))
        span = replica.span_of("traced")
        assert span.name == "text_completion chain"
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert span.parent is not None
        assert f"{span.parent.span_id:016x}" == PARENT_ID
        assert {child.name for child in replica.children(span)} == {"queue", "prefill", "decode"}
        assert replica.span_of("untraced").parent is None
        ids = {(span.attributes or {}).get("gen_ai.response.id") for span in replica.exporter.get_finished_spans()}
        assert ids == {"traced", "untraced", None}, "whoever does not sample has no spans here either"
        assert lines.lines[0]["trace_id"] == TRACE_ID


async def test_a_call_whose_caller_leaves_before_it_has_a_slot_tells_what_it_waited_for(lines: _Lines) -> None:
    async with watched(lines, lambda: make_core(ChainRunner(step_s=0.002), slots=1)) as replica:
        first = asyncio.ensure_future(replica.ask(make_call("first", max_tokens=400)))
        await until(replica.engine, lambda: replica.engine.status().scheduler.num_running == 1)
        second = asyncio.ensure_future(replica.ask(make_call("second")))
        await until(replica.engine, lambda: replica.engine.status().scheduler.num_waiting == 1)
        for asking in (second, first):
            asking.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await until(replica.engine, lambda: len(lines.lines) == 2)
    line = next(line for line in lines.lines if line["request_id"] == "second")
    (answer,) = line["answers"]
    assert (line["outcome"], answer["slot"], answer["ttft_s"]) == ("cancelled", None, None)
    assert answer["waited_s"]["slots"] > 0
    assert sum(answer["waited_s"].values()) == pytest.approx(answer["queue_s"], abs=1e-4)


async def test_a_watcher_that_fails_harms_no_call(lines: _Lines, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def tokens(self, tokens: object) -> None:
            raise RuntimeError("broken")

        def finished(self, record: object) -> None:
            raise RuntimeError("broken")

    async with watched(lines) as replica:
        recorder = replica.runner._recorder
        recorder.sinks = (Broken(), *recorder.sinks)
        await replica.ask(replace(make_call("a"), max_tokens=3))
    assert [line["outcome"] for line in lines.lines] == ["ok"]
    assert "could not be told" in caplog.text
