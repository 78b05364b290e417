"""Slots against KV blocks: worked cases, pools of any shape, the spelling, and the cap by measured gain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError, MemoryPlanError
from engine.memory.slots import (
    balance_slots,
    blocks_per_sequence,
    cap_at_knee,
    describe_slots,
    knee,
    parse_slots,
    slot_ceiling,
)

NUM_BLOCKS_2048 = blocks_per_sequence(2048, 16)


def mac_pool(gib: float) -> Callable[[int], int]:
    """1 GiB fixed, 151.5 MiB of state per slot and for one dummy slot, blocks of 1 MiB."""
    return lambda n: int(gib * 1024 - 1024 - 151.5 * (n + 1))


def test_a_full_length_sequence_is_counted_as_admission_counts_it() -> None:
    assert blocks_per_sequence(2048, 16) == 129
    assert blocks_per_sequence(32768, 16) == 2049
    assert blocks_per_sequence(15, 16) == 1


@pytest.mark.parametrize(
    ("max_slots", "pool", "num_blocks_per_sequence", "expected"),
    [
        pytest.param(8, lambda n: 100_000, 129, (8, 100_000), id="the pool never binds"),
        pytest.param(10, lambda n: (20 - n) * 129, 129, (10, 1290), id="binds exactly"),
        pytest.param(11, lambda n: (20 - n) * 129, 129, (10, 1290), id="one more would hold fewer"),
        pytest.param(128, lambda n: (199_470 - (n + 1) * 1515) // 5, 129, (91, 12_018), id="dense tier"),
        pytest.param(32, lambda n: 5 * 129, 129, (5, 645), id="a flat pool ties: fewer slots"),
        pytest.param(128, lambda n: 39_197 - 303 * n, 129, (90, 11_927), id="a tie one slot above"),
        pytest.param(128, lambda n: 1290 if n <= 3 else 0, 129, (3, 1290), id="large counts fail"),
        pytest.param(5, lambda n: 3, 0, (3, 3), id="a sequence counts as one block at least"),
        pytest.param(8, mac_pool(40), 2049, (8, 38_572), id="40 GiB, 8 at most"),
        pytest.param(128, mac_pool(40), 2049, (18, 37_057), id="40 GiB"),
        pytest.param(128, mac_pool(120), 513, (128, 102_312), id="120 GiB, 8k context"),
        pytest.param(128, mac_pool(120), 2049, (55, 113_372), id="120 GiB, 32k context"),
        pytest.param(128, mac_pool(120), 8193, (14, 119_583), id="120 GiB, 128k context"),
        pytest.param(4, lambda n: 258 if n >= 4 else 0, 129, (2, 258), id="the pool grows: only what it admits"),
    ],
)
def test_worked_cases(
    max_slots: int, pool: Callable[[int], int], num_blocks_per_sequence: int, expected: tuple[int, int]
) -> None:
    balance = balance_slots(max_slots, pool, num_blocks_per_sequence)
    assert (balance.slots, balance.num_blocks) == expected


@pytest.mark.parametrize(
    ("base", "slots_by_cost"),
    [
        (5_000, {0: 38, 1: 38, 37: 30, 129: 19, 303: 11, 1000: 4}),
        (20_000, {0: 128, 1: 128, 37: 120, 129: 77, 303: 46, 1000: 17}),
        (129, {0: 1}),
    ],
)
def test_dearer_slots_mean_fewer(base: int, slots_by_cost: dict[int, int]) -> None:
    for cost, slots in slots_by_cost.items():
        assert balance_slots(128, lambda n, cost=cost: base - cost * n, 129).slots == slots


@pytest.mark.parametrize(
    ("max_slots", "pool", "finding", "fix"),
    [
        (4, lambda n: 128, "needs 129 KV blocks and the largest pool holds 128", "max_model_len"),
        (128, lambda n: 129 - n, "largest pool holds 128", "max_model_len"),
        (128, lambda n: 129 - 37 * n, "largest pool holds 92", "max_model_len"),
        (128, mac_pool(2), "largest pool holds 721", "max_model_len"),
        (128, lambda n: 129 - 129 * n, "No slot count from 1 to 128 leaves", "more memory"),
        (127, lambda n: 129 - 303 * n, "No slot count", "more memory"),
        (126, lambda n: 129 - 1000 * n, "No slot count", "more memory"),
        (0, lambda n: 1000, "No slot count", "more memory"),
    ],
)
def test_nothing_fits(max_slots: int, pool: Callable[[int], int], finding: str, fix: str) -> None:
    with pytest.raises(MemoryPlanError, match=finding) as caught:
        balance_slots(max_slots, pool, 2049 if "721" in finding else 129)
    assert fix in caught.value.fix


@given(
    pools=st.lists(st.integers(-50, 2000), min_size=1, max_size=40),
    num_blocks_per_sequence=st.integers(0, 200),
)
def test_the_count_is_the_best_that_any_pool_admits(pools: list[int], num_blocks_per_sequence: int) -> None:
    divisor = max(1, num_blocks_per_sequence)
    admitted = [min(n, blocks // divisor) for n, blocks in enumerate(pools, 1)]
    if max(admitted) < 1:
        with pytest.raises(MemoryPlanError):
            balance_slots(len(pools), lambda n: pools[n - 1], num_blocks_per_sequence)
        return
    balance = balance_slots(len(pools), lambda n: pools[n - 1], num_blocks_per_sequence)
    assert balance.slots == max(admitted)
    assert balance.num_blocks // divisor >= balance.slots
    assert balance.num_blocks == pools[admitted.index(balance.slots)]


@pytest.mark.parametrize(("text", "asked"), [("auto", "auto"), ("128", 128), ("1", 1)])
def test_spelling(text: str, asked: object) -> None:
    assert parse_slots(text) == asked


@pytest.mark.parametrize("text", ["Auto", "AUTO", "-1", "", "0", "129", "4.0", "+4", " 4", "auto:4", "four"])
def test_any_other_spelling_names_both_choices(text: str) -> None:
    with pytest.raises(ConfigError, match="slots") as caught:
        parse_slots(text)
    assert '"auto"' in caught.value.fix
    assert "1 to 128" in caught.value.fix


def test_display_and_ceiling() -> None:
    assert describe_slots("auto", 6) == "auto:6"
    assert describe_slots(4, 4) == "4"
    assert slot_ceiling("auto") == 128
    assert slot_ceiling(8) == 8


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        pytest.param({1: 1.0, 2: 1.7, 3: 2.0, 4: 2.25}, None, id="still paying at the last measurement"),
        pytest.param({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}, 1, id="slots that add nothing"),
        pytest.param({1: 25.5, 4: 78.9, 16: 216.8, 32: 311.0, 64: 405.0, 128: 462.0}, 64, id="flattens late"),
        pytest.param({1: 62.0, 4: 191.0, 10: 270.0, 16: 275.0}, 10, id="flattens early"),
        pytest.param({1: 1.0, 2: 0.41, 4: 1.6, 8: 1.7}, 4, id="one slow count hides no gain"),
        pytest.param({4: 100.0}, None, id="a single measurement says nothing"),
        pytest.param({}, None, id="no measurement"),
    ],
)
def test_the_knee_is_where_no_larger_count_pays(gain: dict[int, float], expected: int | None) -> None:
    assert knee(gain) == expected


def test_the_cap_says_why() -> None:
    gains = {1: 1.0, 4: 3.2, 8: 3.3, 16: 3.25}
    cap = cap_at_knee(55, gains)
    assert cap is not None
    assert cap.slots == 4
    assert "memory holds 55 slots" in cap.reason
    assert "3.20 times the speed of one, 3.30 with 8" in cap.reason
    assert cap_at_knee(4, gains) is None
    assert cap_at_knee(55, {1: 1.0, 2: 1.7}) is None
