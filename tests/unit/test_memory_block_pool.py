"""Block hashes, the block pool and block tables, alone and against a naive model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.memory.block_hash import extend_hashes, root_hash
from engine.memory.block_pool import BlockPool
from engine.memory.kv_cache_manager import NO_HIT, BlockTable, KvCacheManager, PrefixHit, num_blocks_for
from tests.builders import make_tokens

BLOCK_SIZE = 4


def hashes_of(token_ids: tuple[int, ...], root: bytes = b"root") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, root, token_ids, len(token_ids), BLOCK_SIZE)
    return hashes


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (1226, 77)])
def test_blocks_for_tokens(num_tokens: int, num_blocks: int) -> None:
    assert num_blocks_for(num_tokens, 16) == num_blocks


def test_equal_beginnings_have_equal_hashes_and_nothing_else_has() -> None:
    one = make_tokens(16)
    other = (*one[:8], one[8] + 1, *one[9:])
    assert hashes_of(one)[:2] == hashes_of(other)[:2]
    # The last block holds equal tokens behind different ones: its keys and values differ.
    assert not set(hashes_of(one)[2:]) & set(hashes_of(other)[2:])
    assert len(hashes_of(one[:15])) == 3, "a block that is not full has no hash"


@pytest.mark.parametrize(
    "parts", [("r2", "", ""), ("r1", "salt", ""), ("r1", "", "user"), ("r1s", "alt", ""), ("r1", "u", "ser")]
)
def test_revision_salt_and_user_separate_caches(parts: tuple[str, str, str]) -> None:
    roots = {root_hash("r1", "", ""), root_hash("r1", "s", "alt"), root_hash("r1", "us", "er")}
    assert root_hash(*parts) not in roots
    assert hashes_of(make_tokens(8), root_hash(*parts)) != hashes_of(make_tokens(8), root_hash("r1", "", ""))


def test_hashes_extended_piece_by_piece_equal_those_made_at_once() -> None:
    tokens = make_tokens(23)
    hashes: list[bytes] = []
    for num_tokens in range(len(tokens) + 1):
        extend_hashes(hashes, b"root", tokens, num_tokens, BLOCK_SIZE)
        assert len(hashes) == num_tokens // BLOCK_SIZE
    assert hashes == hashes_of(tokens)


def filled_pool(num_blocks: int = 4) -> BlockPool:
    """Every block cached under its own hash, block 0 released first."""
    pool = BlockPool(num_blocks)
    block_ids = pool.allocate(num_blocks)
    for block_id in sorted(block_ids):
        pool.register(block_id, bytes([block_id]))
    for block_id in sorted(block_ids):
        pool.release([block_id])
    return pool


def test_the_least_recently_used_block_is_evicted() -> None:
    pool = filled_pool()
    pool.share([0])
    pool.release([0])
    assert set(pool.allocate(2)) == {1, 2}
    assert pool.find(bytes([1])) is None
    assert pool.find(bytes([2])) is None
    assert pool.find(bytes([0])) == 0
    assert pool.find(bytes([3])) == 3
    pool.check_invariants()


def test_of_one_sequence_the_end_is_evicted_first() -> None:
    pool = BlockPool(4)
    chain = pool.allocate(4)
    for block_id in chain:
        pool.register(block_id, bytes([block_id]))
    pool.release(chain)
    pool.allocate(1)
    assert [pool.find(bytes([block_id])) for block_id in chain] == [*chain[:3], None]


def test_free_blocks_are_used_before_anything_cached_is_lost() -> None:
    pool = filled_pool(4)
    pool.shrink_cache(2)
    assert (pool.num_free, pool.num_cached) == (2, 2)
    pool.allocate(2)
    assert pool.num_cached == 2


def test_a_held_block_is_never_evicted() -> None:
    pool = filled_pool(4)
    pool.share([1])
    pool.allocate(3)
    assert pool.find(bytes([1])) == 1
    with pytest.raises(AssertionError, match="available"):
        pool.allocate(1)


def test_only_the_first_block_of_a_content_is_named() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"same")
    pool.register(second, b"same")
    pool.release([first, second])
    assert (pool.num_cached, pool.num_free) == (1, 1)
    assert pool.find(b"same") == first


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model that keeps plain counts and a list in order of release."""

    NUM_BLOCKS = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS)
        self.counts: Counter[int] = Counter()
        self.names: dict[int, bytes] = {}
        self.cached: list[int] = []
        self.next_name = 0

    @rule(number=st.integers(0, 3))
    def allocate(self, number: int) -> None:
        num_free = self.NUM_BLOCKS - len(self.cached) - sum(1 for c in self.counts.values() if c)
        if number > num_free + len(self.cached):
            return
        for _ in range(number - num_free):
            del self.names[self.cached.pop(0)]
        for block_id in self.pool.allocate(number):
            assert not self.counts[block_id]
            assert block_id not in self.names
            self.counts[block_id] = 1

    @precondition(lambda self: any(self.counts.values()))
    @rule(data=st.data(), new_name=st.booleans())
    def register(self, data: st.DataObject, new_name: bool) -> None:
        block_id = data.draw(st.sampled_from([b for b, c in self.counts.items() if c]))
        self.next_name += new_name
        name = str(self.next_name).encode()
        if block_id not in self.names and name not in self.names.values():
            self.names[block_id] = name
        self.pool.register(block_id, name)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.names)))
        self.pool.share([block_id])
        self.counts[block_id] += 1
        if block_id in self.cached:
            self.cached.remove(block_id)

    @precondition(lambda self: any(self.counts.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from([b for b, c in self.counts.items() if c]))
        self.pool.release([block_id])
        self.counts[block_id] -= 1
        if not self.counts[block_id] and block_id in self.names:
            self.cached.append(block_id)

    @rule(num_kept=st.integers(0, 3))
    def shrink(self, num_kept: int) -> None:
        while len(self.cached) > num_kept:
            del self.names[self.cached.pop(0)]
        self.pool.shrink_cache(num_kept)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_invariants()
        assert self.pool.num_cached == len(self.cached)
        assert {name: block_id for block_id, name in self.names.items()} == {
            name: self.pool.find(name) for name in self.names.values()
        }
        assert all(self.pool.ref_count(b) == self.counts[b] for b in range(self.NUM_BLOCKS))


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_pool_agrees_with_its_model = PoolMachine.TestCase


def cached_prompt(kv: KvCacheManager, num_tokens: int) -> tuple[tuple[int, ...], BlockTable]:
    """A prompt that was computed and released."""
    tokens = make_tokens(num_tokens)
    table = kv.new_table(b"root", tokens)
    kv.attach(table, NO_HIT, num_tokens)
    kv.commit(table, tokens, num_tokens)
    kv.pool.release(kv.detach(table))
    return tokens, table


@pytest.mark.parametrize(
    ("num_cached", "num_asked", "num_hit", "is_partial"),
    [
        (12, 20, 12, False),
        (12, 12, 11, True),
        (12, 13, 12, False),
        (14, 14, 12, False),
        (3, 20, 0, False),
        (4, 4, 3, True),
    ],
)
def test_a_hit_is_all_but_the_last_token_at_most(
    num_cached: int, num_asked: int, num_hit: int, is_partial: bool
) -> None:
    kv = KvCacheManager(16, BLOCK_SIZE, caching=True)
    cached_prompt(kv, num_cached)
    hit = kv.find_prefix(kv.new_table(b"root", make_tokens(num_asked)), num_asked)
    assert hit.num_tokens == num_hit
    assert (hit.partial_block is not None) == is_partial
    assert len(hit.block_ids) == num_hit // BLOCK_SIZE


def test_a_partial_block_is_copied_and_its_source_kept() -> None:
    kv = KvCacheManager(16, BLOCK_SIZE, caching=True)
    tokens, _ = cached_prompt(kv, 12)
    table = kv.new_table(b"root", tokens)
    hit = kv.find_prefix(table, 12)
    num_available = kv.pool.num_available
    num_taken = kv.num_blocks_taken(hit, 12)
    copy = kv.attach(table, hit, 12)
    assert copy is not None
    assert copy.source == hit.partial_block
    assert copy.target == table.block_ids[2] != copy.source
    assert kv.pool.ref_count(copy.source) == 1
    assert num_available - kv.pool.num_available == num_taken == 4


def test_a_hit_costs_only_the_tail() -> None:
    kv = KvCacheManager(16, BLOCK_SIZE, caching=True)
    tokens = make_tokens(14)
    first, second = kv.new_table(b"root", tokens), kv.new_table(b"root", tokens)
    kv.attach(first, NO_HIT, 14)
    kv.commit(first, tokens, 14)
    hit = kv.find_prefix(second, 14)
    assert kv.num_blocks_taken(hit, 14) == 1
    kv.attach(second, hit, 14)
    assert first.block_ids[:3] == second.block_ids[:3]
    assert first.block_ids[3] != second.block_ids[3]


def test_growth_that_does_not_fit_changes_nothing() -> None:
    kv = KvCacheManager(3, BLOCK_SIZE, caching=True)
    table = kv.new_table(b"root", ())
    kv.attach(table, NO_HIT, 5)
    assert kv.grow(table, 8)
    assert len(table.block_ids) == 2
    assert not kv.grow(table, 13)
    assert len(table.block_ids) == 2
    assert kv.grow(table, 12)


def test_without_caching_nothing_is_found() -> None:
    kv = KvCacheManager(16, BLOCK_SIZE, caching=False)
    _, table = cached_prompt(kv, 12)
    assert kv.find_prefix(table, 12) == PrefixHit()
    assert kv.pool.num_free == 16


def test_what_is_left_after_eviction_is_still_found() -> None:
    kv = KvCacheManager(4, BLOCK_SIZE, caching=True)
    _, table = cached_prompt(kv, 16)
    kv.pool.allocate(2)
    assert kv.find_prefix(table, 17).num_tokens == 8
