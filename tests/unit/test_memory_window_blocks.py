"""Blocks of sliding-window layers: what is behind the window goes back, and prefixes need only what is in sight."""

from __future__ import annotations

import pytest

from engine.memory.window_blocks import HOLE, WindowBlocks, WindowConfig, WindowTable, num_blocks_needed
from tests.builders import make_config, make_request, make_tokens
from tests.fakes import Harness, expected_answer, make_harness

BLOCK_SIZE = 4
WINDOW = 10


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def make_blocks(num_blocks: int = 20) -> WindowBlocks:
    return WindowBlocks(WindowConfig(WINDOW, num_blocks), BLOCK_SIZE, num_tokens_ahead=8, caching=True)


HASHES = [name(number) for number in range(20)]


def test_blocks_behind_the_window_go_back() -> None:
    blocks, table = make_blocks(), WindowTable()
    blocks.attach(table, HASHES, 0)
    for end in range(1, 41):
        blocks.grow(table, end)
        blocks.confirm(table, HASHES, end)
        first_seen = max(0, end + 1 - WINDOW)
        assert HOLE not in table.block_ids[first_seen // BLOCK_SIZE :]
        assert len(table.held) <= 4
    assert table.num_freed == 7
    assert blocks.pool.num_cached == 7, "they can still be found"
    blocks.pool.release(blocks.detach(table))
    blocks.pool.check_invariants()
    assert blocks.pool.num_available == 20


def test_a_prefix_needs_what_is_in_sight_of_its_end() -> None:
    blocks, table = make_blocks(), WindowTable()
    blocks.attach(table, HASHES, 0)
    blocks.grow(table, 40)
    blocks.confirm(table, HASHES, 40)
    blocks.pool.release(blocks.detach(table))
    assert blocks.longest(HASHES, 10) == 10
    blocks.pool.shrink_cache(4)
    # Of a chain the end is evicted first; here the first blocks went back, and so out, before.
    kept = [index for index in range(10) if blocks.pool.find(HASHES[index]) is not None]
    assert kept == [6, 7, 8, 9] or kept == [3, 4, 5, 6]
    assert blocks.longest(HASHES, 10) == kept[-1] + 1
    assert blocks.longest(HASHES, kept[0] + 1) == 0, "one block is not all that is in sight"
    again = WindowTable()
    blocks.attach(again, HASHES, kept[-1] + 1)
    assert len(again.held) == 3
    assert again.num_freed == kept[-1] - 2


@pytest.mark.parametrize("window", [1, 4, 5, 10])
def test_requests_never_lack_a_block(window: int) -> None:
    slots, ahead = 3, 9
    size = num_blocks_needed(window, BLOCK_SIZE, slots, ahead)
    blocks = WindowBlocks(WindowConfig(window, size), BLOCK_SIZE, ahead, caching=False)
    tables = [WindowTable() for _ in range(slots)]
    for number in range(slots):
        assert blocks.fits(tables[:number])
    assert not blocks.fits(tables)
    confirmed = [0] * slots
    for step in range(60):
        for slot, table in enumerate(tables):
            blocks.grow(table, confirmed[slot] + (ahead - slots + 1 if slot == step % slots else 1))
        for slot, table in enumerate(tables):
            confirmed[slot] += ahead - slots + 1 if slot == step % slots else 1
            blocks.confirm(table, [], confirmed[slot])


def harness_with_window(**changes: object) -> Harness:
    window = WindowConfig(WINDOW, 60)
    return make_harness(make_config(window=window, **changes))


def num_computed(harness: Harness, request_id: str) -> int:
    return sum(row.num_tokens for batch in harness.runner.batches for row in batch.rows if row.request_id == request_id)


def test_the_next_turn_shares_the_answers_prefix() -> None:
    harness = harness_with_window()
    first = make_request(make_tokens(50, seed=1), max_tokens=20)
    harness.add(first)
    harness.run()
    answer = harness.answer(first.request_id)
    assert answer == expected_answer(first)
    second = make_request((*first.prompt_token_ids, *answer, *make_tokens(3, seed=2)), max_tokens=2)
    harness.add(second)
    harness.run()
    assert harness.answer(second.request_id) == expected_answer(second)
    assert num_computed(harness, second.request_id) == 73 - 68 + 1


def test_a_long_request_holds_no_more_than_a_short_one() -> None:
    harness = harness_with_window(prefix_cache="off")
    harness.add(make_request(make_tokens(60, seed=1), max_tokens=60))
    windows = harness.scheduler._residency.windows
    assert windows is not None
    most = 0
    while harness.scheduler.has_unfinished:
        harness.step()
        most = max(most, windows.pool.num_blocks - windows.pool.num_available)
    assert most <= 4 + 4
