"""The search for the highest rate that keeps a service level."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serve_app.bench.plan import BenchPlan, Level
from serve_app.bench.results import LoadResult
from serve_app.bench.sweep import RateTried, Search, SweepResult, attained, sweep, sweep_table
from serve_app.bench.workload_files import DEFAULT_WORKLOAD
from serve_app.latency import ServiceLevel, summarize_load
from tests.long.test_bench_verdict import run


def search_for(limit_per_s: float, start_per_s: float = 0.5, max_per_s: float = 64.0) -> SweepResult:
    """Search at an endpoint that keeps its level up to exactly ``limit_per_s``."""
    search = Search(start_per_s, max_per_s)
    for rate in search.rates():
        search.tell(RateTried(rate, 1.0, rate <= limit_per_s))
    return search.result()


@given(st.floats(min_value=0.05, max_value=60), st.floats(min_value=0.3, max_value=4))
def test_the_limit_is_found_from_below(limit_per_s: float, start_per_s: float) -> None:
    assume(limit_per_s >= start_per_s / 8)
    found = search_for(limit_per_s, start_per_s)
    assert found.bounded
    assert found.highest_rate_per_s is not None
    assert 0.85 * limit_per_s <= found.highest_rate_per_s <= limit_per_s
    assert len(found.tried) <= 20
    assert len({each.rate_per_s for each in found.tried}) == len(found.tried)


def test_an_endpoint_without_limit_is_tried_up_to_the_highest_rate_and_no_further() -> None:
    found = search_for(1000.0, max_per_s=10.0)
    assert (found.highest_rate_per_s, found.bounded) == (10.0, False)
    assert max(each.rate_per_s for each in found.tried) == 10.0


def test_an_endpoint_that_keeps_no_rate_is_given_up() -> None:
    found = search_for(0.0)
    assert found.highest_rate_per_s is None
    assert "No rate tried meets TTFT 2000 ms." in sweep_table(found, ServiceLevel(ttft_s=2.0))


def test_failures_count_as_missed() -> None:
    result = run().result
    timings = [call.timing for call in result.calls if call.timing is not None]
    with_failures = replace(result, summary=summarize_load(timings, 8, 20.0))
    level = ServiceLevel(ttft_s=1.5)
    assert attained(result, level) == 1.0
    assert attained(with_failures, level) == 0.5


async def test_the_time_limit_ends_the_search_with_what_is_known() -> None:
    async def never(level: Level) -> LoadResult:
        raise AssertionError(level)

    found = await sweep(never, Search(1.0, 8.0), ServiceLevel(ttft_s=1.0), 0.0)
    assert found == SweepResult(None, False, ())


async def test_each_rate_is_judged_by_its_own_load() -> None:
    async def measure(level: Level) -> LoadResult:
        assert level.rate_per_s is not None
        calls = run().result.calls if level.rate_per_s <= 3 else ()
        return replace(run().result, calls=calls)

    found = await sweep(measure, Search(1.0, 8.0, 0.3), ServiceLevel(ttft_s=1.5), 60.0)
    assert [(each.rate_per_s, each.met) for each in found.tried] == [
        (1.0, True),
        (2.0, True),
        (4.0, False),
        (3.0, True),
    ]
    assert found.highest_rate_per_s == 3.0
    assert "TTFT 1500 ms: 3 sessions per second." in sweep_table(found, ServiceLevel(ttft_s=1.5))


@pytest.mark.parametrize(("rate_per_s", "num_sessions"), [(0.1, 64), (10.0, 600)])
def test_a_fast_rate_is_kept_up_for_a_while(rate_per_s: float, num_sessions: int) -> None:
    plan = BenchPlan(workload=DEFAULT_WORKLOAD, levels=(Level(rate_per_s=rate_per_s),), min_load_s=60.0)
    assert plan.sessions_of(plan.levels[0]) == num_sessions
