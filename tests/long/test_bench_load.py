"""Loads against an endpoint with known timing: nothing lost, nothing invented, times as the server wrote them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from serve_app.bench.client import StreamClient, StreamRecord
from serve_app.bench.errors import BenchError
from serve_app.bench.load import EncodedSession, LoadRecord, encode_sessions, run_closed, run_open
from serve_app.bench.plan import MIN_SESSIONS, BenchPlan, Level, forecast
from serve_app.bench.prompts import PromptWriter
from serve_app.bench.reference_server import Behaviour, ReferenceServer
from serve_app.bench.results import LoadResult, read_load
from serve_app.bench.runner import run_plan
from serve_app.bench.target import EosBan, Target, check_target, resolve_model
from serve_app.bench.workload_files import DEFAULT_WORKLOAD
from serve_app.capacity.lengths import Fixed
from serve_app.capacity.workload import Workload, plan_sessions, poisson_arrivals_s

QUICK = Behaviour(first_token_s=0.004, token_gap_s=0.002)
NUM_TOKENS = 6


def small(num_calls: int = 1) -> Workload:
    each = DEFAULT_WORKLOAD.sessions[0].model_copy(
        update={
            "prompt_tokens": Fixed(value=12),
            "output_tokens": Fixed(value=NUM_TOKENS),
            "new_tokens": Fixed(value=3),
            "calls": Fixed(value=num_calls),
        }
    )
    return DEFAULT_WORKLOAD.model_copy(update={"sessions": (each,)})


def sessions(num: int, num_calls: int = 1) -> tuple[EncodedSession, ...]:
    workload = small(num_calls)
    written = tuple(PromptWriter("7").write(workload, each) for each in plan_sessions(workload, "7", num))
    return encode_sessions(written, {"stream": True})


def nothing() -> None: ...


Send = Callable[[StreamClient], Awaitable[LoadRecord]]


async def load(behaviour: Behaviour, send: Send) -> tuple[ReferenceServer, LoadResult]:
    async with ReferenceServer(behaviour).serving() as server:
        async with StreamClient(f"{server.url}/v1/completions") as client:
            record = await send(client)
        return server, read_load(record)


async def test_a_closed_loop_keeps_exactly_so_many_requests_open() -> None:
    server, result = await load(QUICK, lambda client: run_closed(client, sessions(12), 4, 60, nothing))
    assert server.peak_running == 4
    assert result.summary.num_requests == 12
    assert result.summary.num_failed == 0
    assert result.summary.num_output_tokens == 12 * NUM_TOKENS
    assert result.num_wrong_length == 0
    assert {call.client for call in result.calls} == {0, 1, 2, 3}
    assert result.full_load_tokens_per_s is not None


async def test_requests_arrive_in_the_planned_order() -> None:
    async with ReferenceServer(QUICK).serving() as server, StreamClient(f"{server.url}/v1/completions") as client:
        await run_closed(client, sessions(9), 1, 60, nothing)
    written = [PromptWriter("7").write(small(), each) for each in plan_sessions(small(), "7", 9)]
    assert [body["prompt"] for body in server.requests] == [each.calls[0].body["prompt"] for each in written]


async def test_an_open_loop_does_not_wait_for_a_slow_endpoint() -> None:
    slow = replace(QUICK, first_token_s=0.2)
    arrivals_s = tuple(poisson_arrivals_s("7", 4000.0, 20))
    server, result = await load(slow, lambda client: run_open(client, sessions(20), arrivals_s, 60, nothing))
    assert server.peak_running > 10
    assert result.summary.num_failed == 0
    assert result.full_load_tokens_per_s is None


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    moments_s = tuple(poisson_arrivals_s("7", 5.0, 20_001))
    gaps_s = [b - a for a, b in pairwise(moments_s)]
    mean_s = sum(gaps_s) / len(gaps_s)
    assert moments_s[0] == 0.0
    assert mean_s == pytest.approx(0.2, rel=0.03)
    assert sum((gap - mean_s) ** 2 for gap in gaps_s) / len(gaps_s) == pytest.approx(0.04, rel=0.06)
    assert tuple(poisson_arrivals_s("7", 5.0, 20_001)) == moments_s


async def test_times_are_never_earlier_than_the_server_wrote_them() -> None:
    _, result = await load(QUICK, lambda client: run_closed(client, sessions(8), 4, 60, nothing))
    for call in result.calls:
        assert call.timing is not None
        assert call.timing.ttft_s >= QUICK.first_token_s
        assert call.timing.e2e_s >= QUICK.first_token_s + (NUM_TOKENS - 1) * QUICK.token_gap_s
        assert len(call.timing.chunk_times_s) == NUM_TOKENS


async def test_no_request_goes_out_on_a_connection_that_the_server_may_just_be_closing() -> None:
    server, _ = await load(QUICK, lambda client: run_closed(client, sessions(6), 2, 60, nothing))
    assert server.num_connections == 6


async def test_several_tokens_in_a_chunk_count_by_usage() -> None:
    packed = replace(QUICK, tokens_per_chunk=4)
    _, result = await load(packed, lambda client: run_closed(client, sessions(2), 1, 60, nothing))
    assert result.summary.num_output_tokens == 2 * NUM_TOKENS
    assert all(call.timing is not None and len(call.timing.chunk_times_s) == 2 for call in result.calls)


async def test_failures_stay_outside_the_summary() -> None:
    failing = replace(QUICK, fail_every=3)
    _, result = await load(failing, lambda client: run_closed(client, sessions(9), 1, 60, nothing))
    assert (result.summary.num_requests, result.summary.num_failed) == (9, 3)
    assert result.summary.ttft_s is not None
    assert result.summary.ttft_s.num == 6
    assert result.errors[0][1] == 3
    assert "HTTP 500" in result.errors[0][0]


async def test_a_broken_stream_is_a_failure() -> None:
    broken = replace(QUICK, break_after=2)
    _, result = await load(broken, lambda client: run_closed(client, sessions(2), 2, 60, nothing))
    assert result.summary.num_failed == 2
    assert result.summary.ttft_s is None


async def test_nobody_listening_is_a_failure_and_not_a_crash() -> None:
    async with StreamClient("http://127.0.0.1:9/v1/completions") as client:
        record = StreamRecord()
        await client.stream(b"{}", record)
    assert record.error is not None


async def test_short_answers_are_noticed() -> None:
    _, result = await load(replace(QUICK, short_by=2), lambda client: run_closed(client, sessions(3), 1, 60, nothing))
    assert result.num_wrong_length == 3


async def test_the_time_limit_cuts_a_load_off() -> None:
    stuck = replace(QUICK, first_token_s=60.0)
    _, result = await load(stuck, lambda client: run_closed(client, sessions(4), 2, 0.05, nothing))
    assert result.cut_off
    assert result.summary.num_failed == 2  # the two that were open; the rest was never sent


async def test_a_sessions_calls_follow_one_another() -> None:
    server, result = await load(QUICK, lambda client: run_closed(client, sessions(2, num_calls=3), 2, 60, nothing))
    assert result.summary.num_requests == 6
    assert server.peak_running == 2
    for index in (0, 1):
        calls = sorted((c for c in result.calls if c.session_index == index), key=lambda c: c.call_index)
        times = [call.timing for call in calls if call.timing is not None]
        assert all(a.chunk_times_s[-1] <= b.sent_s for a, b in pairwise(times))


async def test_a_failed_call_ends_its_session() -> None:
    failing = replace(QUICK, fail_every=1)
    _, result = await load(failing, lambda client: run_closed(client, sessions(2, num_calls=3), 1, 60, nothing))
    assert [call.call_index for call in result.calls] == [0, 0]


def silent(_text: str, _fraction: float | None = None) -> None: ...


PLAN = BenchPlan(
    workload=small(),
    levels=(Level(num_clients=1), Level(num_clients=4)),
    sessions_per_client=2,
    idle_sample_s=0.0,
)


async def test_every_target_is_asked_the_same() -> None:
    async with ReferenceServer(QUICK).serving() as first, ReferenceServer(QUICK).serving() as second:
        targets = [Target("a", first.url), Target("b", second.url)]
        runs = await run_plan([await resolve_model(each) for each in targets], PLAN, None, silent)
    assert sorted(body["prompt"] for body in first.requests) == sorted(body["prompt"] for body in second.requests)
    assert [len(each.runs) for each in runs] == [2, 2]
    assert all(each.answers is not None and each.answers.num_equal == each.answers.num_checked == 2 for each in runs)
    assert first.requests[0]["model"] == "reference"
    assert first.requests[0]["ignore_eos"] is True


async def test_the_first_request_that_fails_stops_the_run() -> None:
    async with ReferenceServer(replace(QUICK, fail_every=1)).serving() as server:
        with pytest.raises(BenchError, match="HTTP 500"):
            await run_plan([Target("a", server.url, "reference")], PLAN, None, silent)
    assert len(server.requests) == 1


async def test_the_total_time_limit_starts_no_further_load() -> None:
    async with ReferenceServer(QUICK).serving() as server:
        plan = replace(PLAN, max_total_s=0.0)
        (only,) = await run_plan([Target("a", server.url, "reference")], plan, None, silent)
    assert only.runs == ()


async def test_slots_are_read_while_the_load_runs() -> None:
    async with ReferenceServer(replace(QUICK, slots=2, first_token_s=0.02)).serving() as server:
        (only,) = await run_plan([Target("a", server.url, "reference")], PLAN, None, silent)
    assert {sample.num_slots for run in only.runs for sample in run.slots} == {2}


def test_a_forecast_counts_the_sessions_that_will_be_sent() -> None:
    first, second = forecast(PLAN)
    assert (first.num_sessions, second.num_sessions) == (MIN_SESSIONS, 8)
    assert second.num_prompt_tokens == 8 * 12
    assert second.longest_call_tokens == 12 + NUM_TOKENS


@pytest.mark.parametrize("url", ["http://example.com", "http://10.0.0.4:8000", "ftp://127.0.0.1", "127.0.0.1:8000"])
def test_only_this_machine_is_tested_unasked(url: str) -> None:
    with pytest.raises(BenchError):
        check_target(Target("a", url), allow_remote=False)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://localhost:1", "http://[::1]:8000"])
def test_this_machine_may_be_tested(url: str) -> None:
    check_target(Target("a", url), allow_remote=False)


def test_another_machine_may_be_tested_on_purpose() -> None:
    check_target(Target("a", "http://10.0.0.4:8000"), allow_remote=True)


def test_a_ban_by_logit_bias_names_its_tokens() -> None:
    with pytest.raises(BenchError, match="EOS"):
        check_target(Target("a", "http://127.0.0.1:1", eos_ban=EosBan.LOGIT_BIAS), allow_remote=False)
    extra = Target("a", "http://127.0.0.1:1", eos_ban=EosBan.LOGIT_BIAS, eos_token_ids=(2, 7)).extra
    assert extra["logit_bias"] == {"2": -100.0, "7": -100.0}


async def test_a_model_is_found_or_asked_for() -> None:
    with pytest.raises(BenchError, match="No endpoint"):
        await asyncio.wait_for(resolve_model(Target("a", "http://127.0.0.1:9")), 30)
