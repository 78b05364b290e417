"""The step-cost model: what it learns from a noisy machine, and the chunks that follow from it."""

from __future__ import annotations

import random

import pytest

from engine.scheduler.robust_fit import RobustFit
from engine.scheduler.step_cost import MIN_CHUNK_SHARE, MIN_CHUNK_TOKENS, StepCostModel, StepLoad, num_causal_pairs

FIXED_S, ROW_S, CONTEXT_S, TOKEN_S, PAIR_S = 0.030, 0.002, 1e-7, 1 / 3000, 1e-8


def machine_s(load: StepLoad, speed: float = 1.0) -> float:
    seconds = FIXED_S + ROW_S * load.num_decode_rows + CONTEXT_S * load.num_decode_context_tokens
    seconds += TOKEN_S * load.num_chunk_tokens + PAIR_S * load.num_chunk_pairs
    return seconds / speed


def random_load(draw: random.Random) -> StepLoad:
    num_rows = draw.randint(0, 8)
    context = sum(draw.randint(100, 8000) for _ in range(num_rows))
    if num_rows and draw.random() < 0.6:
        return StepLoad(num_rows, context)
    num_tokens, start = draw.randint(16, 512), draw.randint(0, 20_000)
    return StepLoad(num_rows, context, num_tokens, num_causal_pairs(start, num_tokens))


def trained(num_steps: int = 400, *, outliers: float = 0.0, speed: float = 1.0, seed: int = 1) -> StepCostModel:
    model = StepCostModel(target_stall_s=0.25, max_chunk_tokens=512)
    train(model, num_steps, outliers, speed, seed)
    return model


def train(model: StepCostModel, num_steps: int, outliers: float, speed: float, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(num_steps):
        load = random_load(draw)
        late = draw.uniform(3.0, 60.0) if draw.random() < outliers else 1.0
        model.observe(load, machine_s(load, speed) * draw.lognormvariate(0.0, 0.03) * late)


def errors(model: StepCostModel, speed: float = 1.0) -> list[float]:
    draw = random.Random(99)
    loads = [random_load(draw) for _ in range(300)]
    return sorted(abs(model.predict_s(load) / machine_s(load, speed) - 1.0) for load in loads)


@pytest.mark.parametrize("outliers", [0.0, 0.05, 0.15])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_predicts_steps_that_it_has_not_seen(outliers: float, seed: int) -> None:
    found = errors(trained(outliers=outliers, seed=seed))
    assert found[len(found) // 2] < 0.05
    assert found[int(len(found) * 0.95)] < 0.20


def test_it_follows_a_machine_that_slows_down() -> None:
    model = trained()
    train(model, 200, 0.05, 0.5, seed=5)
    found = errors(model, speed=0.5)
    assert found[len(found) // 2] < 0.08


def test_a_cost_that_is_not_seen_for_long_is_kept() -> None:
    model = trained()
    chunk = StepLoad(4, 4000, 256, num_causal_pairs(1000, 256))
    before_s = model.predict_s(chunk)
    draw = random.Random(3)
    for _ in range(2000):
        load = StepLoad(4, draw.randint(3000, 5000))
        model.observe(load, machine_s(load))
    assert model.predict_s(chunk) == pytest.approx(before_s, rel=0.1)
    assert model.predict_s(StepLoad(8, 60_000)) == pytest.approx(machine_s(StepLoad(8, 60_000)), rel=0.25)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_are_ignored(value: float) -> None:
    model = StepCostModel(0.25, 512)
    model.observe(StepLoad(1, 10), value)
    assert not model.is_known
    assert model.predict_s(StepLoad(1, 10)) == 0.0


@pytest.mark.parametrize("start", [0, 2_000, 20_000])
@pytest.mark.parametrize("num_rows", [1, 4, 8])
def test_a_chunk_beside_decode_rows_fills_the_stall_target(start: int, num_rows: int) -> None:
    model = trained(1000)
    load = StepLoad(num_rows, num_rows * 2000)
    num_tokens = model.chunk_budget(load).tokens_from(start)
    whole = StepLoad(num_rows, num_rows * 2000, num_tokens, num_causal_pairs(start, num_tokens))
    assert num_tokens == 512 or machine_s(whole) == pytest.approx(0.25, rel=0.12)
    assert machine_s(whole) < 0.28


def test_longer_context_means_smaller_chunks() -> None:
    budget = trained(1000).chunk_budget(StepLoad(4, 8000))
    sizes = [budget.tokens_from(start) for start in (0, 5_000, 20_000, 100_000)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1.3 * sizes[-1]


def test_with_nobody_decoding_the_chunk_is_the_largest() -> None:
    assert StepCostModel(0.25, 512).chunk_budget(StepLoad()).tokens_from(10_000) == 512
    assert trained().chunk_budget(StepLoad()).tokens_from(100_000) == 512


def test_before_anything_is_known_a_chunk_is_cautious() -> None:
    assert StepCostModel(0.25, 512).chunk_budget(StepLoad(1, 10)).tokens_from(0) == 128
    assert StepCostModel(0.25, 4).chunk_budget(StepLoad(1, 10)).tokens_from(0) == 4


def test_where_decoding_alone_takes_the_target_prompts_keep_a_share() -> None:
    model = StepCostModel(target_stall_s=0.010, max_chunk_tokens=512)
    train(model, 400, 0.0, 1.0, seed=1)
    load = StepLoad(8, 8000)
    num_tokens = model.chunk_budget(load).tokens_from(0)
    chunk_s = machine_s(StepLoad(8, 8000, num_tokens, num_causal_pairs(0, num_tokens))) - machine_s(load)
    assert num_tokens >= MIN_CHUNK_TOKENS
    assert chunk_s == pytest.approx(machine_s(load) * MIN_CHUNK_SHARE / (1 - MIN_CHUNK_SHARE), rel=0.2)


def test_a_budget_is_spent_by_several_prompts() -> None:
    budget = trained(1000).chunk_budget(StepLoad(4, 8000))
    whole = budget.tokens_from(0)
    budget.spend(0, 100)
    assert budget.tokens_from(0) == pytest.approx(whole - 100, abs=3)
    budget.spend(0, budget.tokens_from(0))
    assert budget.tokens_from(0) <= 3


def test_causal_pairs() -> None:
    assert num_causal_pairs(0, 1) == 1
    assert num_causal_pairs(0, 4) == 1 + 2 + 3 + 4
    assert num_causal_pairs(10, 2) == 11 + 12


def test_the_fit_never_has_a_negative_cost() -> None:
    fit = RobustFit((1.0, 1.0))
    draw = random.Random(1)
    for _ in range(100):
        x = draw.random()
        fit.observe((1.0, x), 1.0 - 0.5 * x)
        assert min(fit.coefficients) >= 0.0
    assert fit.predict((1.0, 0.5)) == pytest.approx(0.75, rel=0.1)
