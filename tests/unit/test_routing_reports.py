"""What replicas say and remember, and what a router adds to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from serve_app.protocol import PrefixChain
from serve_app.routing.local_map import UNCONFIRMED_FOR_S, Difference, LocalMap
from serve_app.routing.prefix_index import ASSUMED_FOR_S, PrefixIndex
from serve_app.routing.prefix_memory import PrefixMemory
from serve_app.routing.report import ReplicaReport, from_stats, tag_of, to_stats

REPORT = ReplicaReport(
    sequence=7,
    slots=4,
    num_running=3,
    num_waiting=2,
    num_unread_tokens=900,
    prefill_tokens_per_s=412.5,
    answer_s=6.25,
    answer_row_s=0.5,
    answer_tokens=80.5,
    ready=True,
    draining=True,
    open_tags=frozenset({1, 2**32 - 1}),
    prefixes=frozenset({3, 2**64 - 1}),
)
NAMES = st.sets(st.integers(0, 5), max_size=6).map(frozenset)


def chain(*names: int, tokens: int = 100) -> PrefixChain:
    ends = tuple(tokens * (index + 1) for index in range(len(names)))
    return PrefixChain(names, ends, names[0], ends[-1])


def test_a_report_survives_the_way() -> None:
    assert from_stats(to_stats(REPORT)) == REPORT
    bare = ReplicaReport(sequence=1, slots=1)
    assert from_stats(to_stats(bare)) == bare


def test_reports_of_other_versions_are_read_as_far_as_they_go() -> None:
    assert from_stats({}) is None
    assert from_stats({"sequence": 1, "slots": 2, "news": "x"}) == ReplicaReport(sequence=1, slots=2)
    broken = {**to_stats(REPORT), "open_tags": b"123", "prefixes": "text", "answer_s": 0.0}
    assert from_stats(broken) == replace(REPORT, open_tags=frozenset(), prefixes=frozenset(), answer_s=None)


def test_a_memory_lets_go_of_the_longest_unused_and_keeps_beginnings_longer_than_ends() -> None:
    memory = PrefixMemory(500)
    memory.remember(chain(1, 2, 3))
    memory.remember(chain(1, 4, 5))
    assert memory.num_tokens == 500
    memory.remember(chain(1, 6))
    assert memory.newest() == {1, 2, 4, 5, 6}
    assert memory.num_cached_tokens(chain(1, 2, 3)) == 200
    assert memory.num_cached_tokens(chain(9, 2)) == 200, "the name of a beginning covers everything before it"
    assert memory.newest(2) == {1, 6}


def test_a_memory_of_nothing_and_a_new_engine() -> None:
    memory = PrefixMemory(0)
    memory.remember(chain(1))
    assert not memory.newest()
    memory.resize(1000)
    memory.remember(chain(1, 2), salt="anna")
    assert memory.num_cached_tokens(chain(1, 2)) == 0
    assert memory.num_cached_tokens(chain(1, 2), salt="anna") == 200
    memory.resize(100)
    assert memory.num_tokens == 100
    memory.forget_all()
    assert memory.num_tokens == 0
    assert not memory.newest()


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True), max_size=30), st.integers(0, 900))
def test_a_memory_never_holds_more_than_the_cache(prompts: list[list[int]], num_kept: int) -> None:
    memory = PrefixMemory(num_kept)
    for names in prompts:
        memory.remember(chain(*names))
        assert memory.num_tokens <= num_kept
        assert memory.num_tokens == sum(memory._share.values())


class IndexMachine(RuleBasedStateMachine):
    """The index against a plain model: what each row reported last, and what is assumed until when."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.reported: dict[int, frozenset[int]] = {}
        self.assumed: dict[int, dict[int, float]] = {}
        self.now_s = 0.0

    @rule(row=st.integers(0, 2), names=NAMES, passed_s=st.sampled_from([0.0, ASSUMED_FOR_S / 2, ASSUMED_FOR_S]))
    def report(self, row: int, names: frozenset[int], passed_s: float) -> None:
        self.now_s += passed_s
        self.index.report(row, names, self.now_s)
        self.reported[row] = names
        assumed = self.assumed.get(row, {})
        self.assumed[row] = {n: until for n, until in assumed.items() if n not in names and until > self.now_s}

    @rule(row=st.integers(0, 2), names=NAMES)
    def assume(self, row: int, names: frozenset[int]) -> None:
        self.index.assume(row, tuple(names), self.now_s)
        new = dict.fromkeys(names - self.reported.get(row, frozenset()), self.now_s + ASSUMED_FOR_S)
        self.assumed.setdefault(row, {}).update(new)

    @rule(row=st.integers(0, 2))
    def remove(self, row: int) -> None:
        self.index.remove(row)
        self.reported.pop(row, None)
        self.assumed.pop(row, None)

    @invariant()
    def the_longest_known_beginning_counts(self) -> None:
        asked = chain(*range(6))
        cached = self.index.num_cached_tokens(asked.hashes, asked.num_tokens, 3)
        for row in range(3):
            known = {*self.reported.get(row, ()), *self.assumed.get(row, ())}
            assert cached[row] == (100 * (max(known) + 1) if known else 0)

    def teardown(self) -> None:
        for row in range(3):
            self.index.remove(row)
        assert not self.index._rows_by_name, "names without holders are kept"


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=30, stateful_step_count=20)


def test_many_holders_are_found_at_once() -> None:
    index = PrefixIndex()
    for row in range(0, 50, 2):
        index.report(row, frozenset({1}), 0.0)
    assert index.num_cached_tokens((1,), (10,), 50).tolist() == [10.0 * (row % 2 == 0) for row in range(50)]
    assert np.count_nonzero(index.num_cached_tokens((2,), (10,), 50)) == 0


def test_a_call_counts_until_a_report_counts_it() -> None:
    local = LocalMap()
    local.sent("a", "r1", 50, 0.0)
    local.sent("b", "r1", 70, 0.0)
    assert local.difference("r1") == Difference(2, 120)
    local.reported("r1", frozenset({tag_of("a")}), 1.0)
    assert local.difference("r1") == Difference(1, 70)
    assert local.difference("r2") == Difference()


def test_a_call_that_came_back_is_taken_off_the_report_that_still_counts_it() -> None:
    local = LocalMap()
    local.sent("a", "r1", 50, 0.0)
    local.reported("r1", frozenset({tag_of("a"), tag_of("another router's")}), 1.0)
    local.came_back("a", "r1")
    assert local.difference("r1") == Difference(-1, 0)
    local.reported("r1", frozenset({tag_of("another router's")}), 2.0)
    assert local.difference("r1") == Difference()
    assert local.open_at("r1") == ()


def test_a_call_that_came_back_before_a_report_that_was_made_while_it_ran() -> None:
    local = LocalMap()
    local.sent("a", "r1", 50, 0.0)
    local.came_back("a", "r1")
    assert local.difference("r1") == Difference()
    local.reported("r1", frozenset({tag_of("a")}), 1.0)
    assert local.difference("r1") == Difference(-1, 0)


def test_a_call_moves_from_one_replica_to_another() -> None:
    local = LocalMap()
    assert local.sent("a", "r1", 50, 0.0) is None
    assert local.sent("a", "r2", 50, 0.1) == "r1"
    assert local.difference("r1") == Difference()
    assert local.where("a") == "r2"
    local.came_back("a", "r1")
    assert local.open_at("r2") == ("a",), "the end of the first try must not end the second"
    local.removed("r2")
    assert local.where("a") is None


@pytest.mark.parametrize(("confirmed", "num_left"), [(True, 1), (False, 0)])
def test_a_call_that_never_got_there_is_forgotten(confirmed: bool, num_left: int) -> None:
    local = LocalMap()
    local.sent("a", "r1", 50, 0.0)
    if confirmed:
        local.confirm("a")
    local.reported("r1", frozenset(), UNCONFIRMED_FOR_S + 1.0)
    assert local.difference("r1").num_requests == num_left
