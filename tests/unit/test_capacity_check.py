"""From measurement to prediction: the fit finds the costs that made the times, and a simulated load is the sent one."""

from __future__ import annotations

import pytest

from engine.scheduler.step_cost import StepLoad
from serve_app.bench.errors import BenchError
from serve_app.bench.profile import DecodePoint, PromptPoint, fit, read_decode
from serve_app.capacity.check import compare, predict
from serve_app.capacity.perf_model import FittedTimes, chunk_s, decode_rows_s
from serve_app.capacity.profile import SCHEMA, MachineProfile
from serve_app.capacity.simulator import Load
from serve_app.latency import RequestTiming
from tests.long.test_capacity_simulator import office

TRUE = FittedTimes(0.012, 0.004, 2e-6, 0.003, 0.0004, 2e-8)
OVERHEAD_S = 0.05
CHUNK = 512
LENGTHS = (64, 256, 512, 1024, 2048)


def prompt_s(num_tokens: int) -> float:
    whole, rest = divmod(num_tokens, CHUNK)
    starts = [CHUNK * number for number in range(whole)]
    seconds = sum(chunk_s(TRUE, CHUNK, start) for start in starts)
    return OVERHEAD_S + seconds + (chunk_s(TRUE, rest, whole * CHUNK) if rest else 0.0)


def points(noise: float = 0.0) -> tuple[list[PromptPoint], list[DecodePoint]]:
    signs = (1 + noise, 1 - noise, 1.0)
    prompts = [PromptPoint(n, prompt_s(n) * signs[i % 3]) for i, n in enumerate(LENGTHS * 3)]
    decodes = [
        DecodePoint(rows, context, decode_rows_s(TRUE, rows, context) * signs[rows % 3])
        for context in (56, 1048)
        for rows in (1, 2, 4, 8, 16)
    ]
    return prompts, decodes


def test_the_fit_finds_the_costs() -> None:
    found = fit(*points(), CHUNK)
    for load in (StepLoad(1, 100), StepLoad(8, 8000), StepLoad(3, 900, 512, 400_000), StepLoad(0, 0, 100, 5000)):
        assert found.times.step_s(load) == pytest.approx(TRUE.step_s(load), rel=0.03)
    assert found.overhead_s == pytest.approx(OVERHEAD_S, rel=0.1)
    assert found.residual < 0.01
    assert found.gains[8] == pytest.approx(8 * decode_rows_s(TRUE, 1, 56) / decode_rows_s(TRUE, 8, 56), rel=0.01)


def test_noise_is_averaged_and_one_hiccup_is_ignored() -> None:
    prompts, decodes = points(noise=0.05)
    prompts.append(PromptPoint(512, 30.0))
    found = fit(prompts, decodes, CHUNK)
    for load in (StepLoad(4, 4000), StepLoad(0, 0, 512, 130_000)):
        assert found.times.step_s(load) == pytest.approx(TRUE.step_s(load), rel=0.12)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(BenchError, match="Too few"):
        fit([PromptPoint(64, 1.0)], [], CHUNK)


def test_a_step_is_read_where_all_rows_decode() -> None:
    def stream(first_s: float, num: int, gap_s: float, tokens: int) -> RequestTiming:
        return RequestTiming(0.0, tuple(first_s + gap_s * i for i in range(num)), 30, tokens)

    # The second stream packs two tokens into a chunk; both decode a token every 20 ms.
    point = read_decode([stream(1.0, 41, 0.02, 41), stream(1.3, 20, 0.04, 40)])
    assert point is not None
    assert (point.num_rows, point.step_s) == (2, pytest.approx(0.02, rel=0.01))
    assert read_decode([stream(1.0, 10, 0.02, 10), stream(5.0, 10, 0.02, 10)]) is None


def test_a_prediction_of_the_simulators_own_load_is_exact() -> None:
    profile = MachineProfile(SCHEMA, "now", "m", "x", TRUE, OVERHEAD_S, 0.0, {}, CHUNK, 0.5)
    load = Load(office().scaled(0.05), 0.2, 30, seed="7/0/0.2/s", warmup_share=0.0)
    predicted = predict(load, profile, macs=2, slots=2)
    assert len(predicted) == 30
    rows = compare(predicted, predicted)
    assert [row.figure for row in rows] == ["ttft p50", "ttft p95", "e2e p50", "e2e p95"]
    assert all(row.error == 0 for row in rows)
    doubled = [
        RequestTiming(t.sent_s, tuple(t.sent_s + 2 * (m - t.sent_s) for m in t.chunk_times_s), 1, t.num_output_tokens)
        for t in predicted
    ]
    assert all(row.error == pytest.approx(1.0) for row in compare(predicted, doubled))
