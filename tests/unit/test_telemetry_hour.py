"""The last hour: what is older is forgotten, and percentiles of many replicas are those of all their values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.latency import percentile
from serve_app.telemetry.hour import Buckets, LastHour, added, count, percentile_s
from serve_app.telemetry.recorder import Tokens
from tests.telemetry_samples import make_record

TIMES = st.lists(st.floats(0.0001, 1000.0), min_size=1, max_size=60)


@given(TIMES, TIMES, st.sampled_from([0, 50, 90, 95, 100]))
def test_percentiles_of_replicas_together_are_within_five_percent(one: list[float], other: list[float], q: int) -> None:
    parts: list[Buckets] = [{}, {}]
    for buckets, values in zip(parts, (one, other), strict=True):
        for value in values:
            count(buckets, value)
    found = percentile_s(added(parts), q)
    ordered = sorted([*one, *other])
    # Between the two neighbours of the exact rank, give or take a bucket.
    below = max(value for value in ordered if value <= percentile(ordered, q) * (1 + 1e-9))
    above = min(value for value in ordered if value >= percentile(ordered, q) * (1 - 1e-9))
    assert found is not None
    assert below * 0.95 <= found <= above * 1.05


def test_nothing_has_no_percentile() -> None:
    assert percentile_s({}, 50) is None


def test_minutes_are_kept_for_an_hour() -> None:
    hour = LastHour()
    for minute in range(100):
        hour.tokens(Tokens(minute, [0.1], [(10, 4)]), minute * 60.0 + 5)
        hour.finished(make_record(outcome="ok" if minute % 2 else "queue_full"), minute * 60.0 + 50)
    minutes = hour.minutes(99 * 60.0 + 59)
    assert [minute.number for minute in minutes] == list(range(40, 100))
    assert minutes[-1].num_output_tokens == 99
    assert sum(minute.num_failed for minute in minutes) == 30
    assert [minute.number for minute in hour.minutes(130 * 60.0)] == list(range(71, 100))
    assert hour.minutes(1000 * 60.0) == ()


def test_the_pace_is_that_of_the_last_whole_seconds() -> None:
    hour = LastHour()
    for tenth in range(100):
        hour.tokens(Tokens(3, [], []), 50.0 + tenth / 10)
    assert hour.tokens_per_s(60.0) == pytest.approx(30.0)
    assert hour.tokens_per_s(62.5) == pytest.approx(18.0)
    assert hour.tokens_per_s(80.0) == 0.0
