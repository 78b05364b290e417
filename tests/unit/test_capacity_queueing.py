"""Closed forms against published values and against one another."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.capacity.queueing import erlang_c, mg1_mean_wait_s, mgc_mean_wait_s, mmc_wait, saturated_service_s

PER_HOUR = 1 / 3600


@pytest.mark.parametrize(
    ("macs", "service_s", "probability", "mean_s", "p95_s"),
    [
        (2, 9.0, 0.481, 5.77, 27.2),
        (3, 9.0, 0.155, 0.80, 5.83),
        (4, 9.0, 0.042, 0.14, 0.0),
        (3, 10.5, 0.222, 1.51, 10.16),
        (4, 10.5, 0.068, 0.28, 1.30),
        (2, 12.0, 0.758, 27.3, 97.9),
        (4, 12.0, 0.102, 0.53, 3.69),
    ],
)
def test_an_office_of_500_calls_an_hour(
    macs: int, service_s: float, probability: float, mean_s: float, p95_s: float
) -> None:
    wait = mmc_wait(macs, 500 * PER_HOUR, service_s)
    assert wait.probability == pytest.approx(probability, abs=0.001)
    assert wait.mean_s == pytest.approx(mean_s, abs=0.005, rel=0.005)
    assert wait.p95_s == pytest.approx(p95_s, rel=0.01, abs=0.01)


@pytest.mark.parametrize(("macs", "mean_s"), [(3, 5.96), (4, 3.61), (5, 2.59), (6, 2.02)])
def test_pinned_sessions_wait_as_pollaczek_and_khinchine_say(macs: int, mean_s: float) -> None:
    assert mg1_mean_wait_s(500 * PER_HOUR / macs, 10.5, 0.2) == pytest.approx(mean_s, rel=0.01)


def test_an_unstable_line_has_no_wait() -> None:
    assert mmc_wait(1, 1.0, 1.0).mean_s == math.inf
    assert mg1_mean_wait_s(1.0, 1.0, 0.0) == math.inf
    assert erlang_c(3, 3.0) == 1.0


@given(st.integers(1, 60), st.floats(0.01, 0.99))
def test_more_servers_at_the_same_load_each_wait_less(servers: int, utilisation: float) -> None:
    few, many = (erlang_c(n, utilisation * n) for n in (servers, servers + 1))
    assert 0 <= many <= few + 1e-12 <= 1 + 1e-12


@given(st.floats(0.01, 0.95), st.floats(0.1, 30))
def test_one_exponential_server_is_all_three(utilisation: float, service_s: float) -> None:
    rate = utilisation / service_s
    expected = utilisation * service_s / (1 - utilisation)
    assert mmc_wait(1, rate, service_s).mean_s == pytest.approx(expected)
    assert mg1_mean_wait_s(rate, service_s, 1.0) == pytest.approx(expected)
    assert mgc_mean_wait_s(1, rate, service_s, 1.0) == pytest.approx(expected)


def test_large_fleets_do_not_overflow() -> None:
    assert 0 < mmc_wait(5000, 4900.0, 1.0).probability < 1


@pytest.mark.parametrize(
    ("prefill_s", "gain", "saved"), [(2.0, 1.7, 0.32), (2.0, 2.25, 0.432), (3.5, 1.7, 0.275), (8.0, 2.8, 0.30)]
)
def test_machines_saved_by_slots_at_saturation(prefill_s: float, gain: float, saved: float) -> None:
    alone_s = prefill_s + 7.0
    assert 1 - saturated_service_s(prefill_s, 7.0, gain) / alone_s == pytest.approx(saved, abs=0.001)
