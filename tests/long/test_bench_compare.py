"""Two runs of the same load, pair by pair."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.bench.compare import compare, comparison_table
from serve_app.bench.errors import BenchError
from serve_app.bench.plan import Level
from serve_app.bench.results import CallResult
from serve_app.latency import RequestTiming
from tests.long.test_bench_verdict import document, run


def faster(call: CallResult, factor: float) -> CallResult:
    assert call.timing is not None
    times = tuple(moment * factor for moment in call.timing.chunk_times_s)
    timing = RequestTiming(0.0, times, call.timing.num_prompt_tokens, call.timing.num_output_tokens)
    return replace(call, timing=timing)


def test_ratios_pair_request_with_request() -> None:
    ours = run()
    calls = tuple(reversed([faster(call, 0.5) for call in ours.result.calls]))
    theirs, better = document("theirs", ours), document("ours", run(calls=calls[1:], duration_s=10.0))
    (level,) = compare(theirs, better)
    assert (level.num_pairs, level.num_unpaired) == (7, 1)
    for ratio in (level.ttft, level.tpot, level.e2e):
        assert ratio is not None
        assert ratio.min == ratio.max == pytest.approx(0.5)
    assert level.output_tokens_per_s is not None
    assert level.output_tokens_per_s.p50 == pytest.approx(2.0)
    assert "ours / theirs" in comparison_table(theirs, better)


def test_a_failed_request_is_no_pair() -> None:
    calls = tuple(replace(call, timing=None, error="x") for call in run().result.calls)
    (level,) = compare(document(), document("other", run(calls=calls)))
    assert level.num_pairs == 0
    assert level.ttft is None
    assert "| - |" in comparison_table(document(), document("other", run(calls=calls)))


@pytest.mark.parametrize(
    "changes",
    [{"seed": "8"}, {"sessions_per_client": 9}, {"levels": (Level(num_clients=99),)}],
    ids=lambda each: min(each),
)
def test_different_loads_are_not_compared(changes: dict[str, object]) -> None:
    first = document()
    second = replace(first, plan=replace(first.plan, **changes))  # type: ignore[arg-type]
    with pytest.raises(BenchError):
        compare(first, second)
