"""The definitions that bench, metrics and planner share."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.latency import RequestTiming, ServiceLevel, percentile, summarize, summarize_load

FLOATS = st.floats(min_value=0, max_value=1e6)


def timing(*chunks_s: float, num_output_tokens: int = 5, queue_s: float | None = None) -> RequestTiming:
    return RequestTiming(10.0, chunks_s, 100, num_output_tokens, queue_s)


@given(st.lists(FLOATS, min_size=1), st.floats(min_value=0, max_value=100))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    assert math.isclose(percentile(sorted(values), q), float(np.percentile(values, q)), rel_tol=1e-9, abs_tol=1e-9)


def test_no_measurement_has_no_summary() -> None:
    assert summarize([]) is None


def test_one_value_is_every_percentile() -> None:
    summary = summarize([3.0])
    assert summary is not None
    assert (summary.num, summary.mean, summary.min, summary.p50, summary.p99, summary.max) == (1, 3, 3, 3, 3, 3)


def test_times_of_one_request() -> None:
    request = timing(11.0, 11.5, 13.0, num_output_tokens=5)
    assert request.ttft_s == 1.0
    assert request.e2e_s == 3.0
    assert request.tpot_s == 0.5  # four tokens after the first in two seconds, however they were packed in chunks
    assert request.gaps_s == (0.5, 1.5)


def test_one_token_has_no_time_per_further_token() -> None:
    assert timing(11.0, num_output_tokens=1).tpot_s is None


@pytest.mark.parametrize(
    ("level", "met"),
    [
        (ServiceLevel(), True),
        (ServiceLevel(ttft_s=1.0, tpot_s=0.5, e2e_s=3.0), True),
        (ServiceLevel(ttft_s=0.99), False),
        (ServiceLevel(tpot_s=0.49), False),
        (ServiceLevel(e2e_s=2.99), False),
        (ServiceLevel(queue_s=5.0), False),  # unknown is not kept
    ],
)
def test_service_level(level: ServiceLevel, met: bool) -> None:
    assert level.met_by(timing(11.0, 11.5, 13.0)) is met


def test_failures_count_but_lend_no_latency() -> None:
    load = summarize_load([timing(11.0, 13.0), timing(12.0, 13.0)], 3, 4.0, ServiceLevel(ttft_s=1.5))
    assert (load.num_requests, load.num_failed) == (5, 3)
    assert load.requests_per_s == 0.5
    assert load.output_tokens_per_s == 2.5
    assert load.total_tokens_per_s == 52.5
    assert load.goodput_per_s == 0.25
    assert load.ttft_s is not None
    assert load.ttft_s.num == 2


def test_without_bounds_there_is_no_goodput() -> None:
    assert summarize_load([timing(11.0)], 0, 1.0, ServiceLevel()).goodput_per_s is None


def test_pooled_gaps_show_a_stall_that_tpot_hides() -> None:
    smooth, stalled = timing(11, 12, 13, 14, 15), timing(11, 11.5, 12, 12.5, 15)
    load = summarize_load([smooth, stalled], 0, 5.0)
    assert load.itl_s is not None
    assert load.tpot_s is not None
    assert load.itl_s.max == 2.5
    assert load.tpot_s.max == 1.0
