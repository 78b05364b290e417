"""Shared beginnings: found, waited for, copied; forks; and the walls between caches."""

from __future__ import annotations

import pytest

from engine.errors import StepFailedError
from engine.memory.block_pool import BlockPool
from engine.request import EngineRequest, WaitReason
from tests.builders import make_config, make_request, make_tokens
from tests.fakes import Harness, expected_answer, make_harness

PIPELINES = pytest.mark.parametrize("steps_in_flight", [1, 2])


def num_computed(harness: Harness, request: EngineRequest) -> int:
    """Tokens that went through the model for a request."""
    return sum(
        row.num_tokens for batch in harness.runner.batches for row in batch.rows if row.request_id == request.request_id
    )


def num_prompt_computed(harness: Harness, request: EngineRequest) -> int:
    return sum(
        min(row.num_tokens, max(0, row.num_prompt_tokens - row.start))
        for batch in harness.runner.batches
        for row in batch.rows
        if row.request_id == request.request_id
    )


def assert_all_right(harness: Harness, *requests: EngineRequest) -> None:
    for request in requests:
        assert harness.answer(request.request_id) == expected_answer(request)


def test_a_finished_prompt_is_not_computed_again() -> None:
    harness = make_harness()
    first = make_request(18, prompt_seed=1)
    harness.add(first)
    harness.run()
    second = make_request(26, prompt_seed=1)
    harness.add(second)
    harness.run()
    assert_all_right(harness, first, second)
    assert harness.last(second.request_id).num_cached_tokens == 16
    assert num_prompt_computed(harness, second) == 10


def test_the_next_turn_of_a_chat_reuses_the_answer_too() -> None:
    harness = make_harness()
    first = make_request(10, max_tokens=9)
    harness.add(first)
    harness.run()
    chat = (*first.prompt_token_ids, *harness.answer(first.request_id), *make_tokens(5, seed=3))
    second = make_request(chat)
    harness.add(second)
    harness.run()
    assert harness.last(second.request_id).num_cached_tokens == 16
    assert_all_right(harness, second)


@pytest.mark.parametrize("num_tokens", [4, 8, 12, 16])
def test_a_wholly_cached_prompt_computes_its_last_token_only(num_tokens: int) -> None:
    harness = make_harness()
    first, second = (make_request(num_tokens, prompt_seed=1) for _ in range(2))
    harness.add(first)
    harness.run()
    harness.add(second)
    batch = harness.step()
    assert batch is not None
    assert [(row.start, row.num_tokens, row.samples) for row in batch.rows] == [(num_tokens - 1, 1, True)]
    assert len(batch.block_copies) == 1
    harness.run()
    assert_all_right(harness, first, second)
    assert harness.last(second.request_id).num_cached_tokens == num_tokens - 1


def test_a_wholly_cached_prompt_fits_where_its_copy_would_not() -> None:
    harness = make_harness(make_config(num_blocks=4, max_model_len=16))
    first, second = (make_request(16 - 1, prompt_seed=1, max_tokens=1) for _ in range(2))
    longer = make_request(make_tokens(16 - 4, seed=1), max_tokens=1)
    harness.add(first)
    harness.run()
    harness.add(second, longer)
    harness.run()
    assert_all_right(harness, first, second, longer)


@PIPELINES
@pytest.mark.parametrize("num_twins", [1, 5])
def test_twins_that_arrive_together_are_computed_once(steps_in_flight: int, num_twins: int) -> None:
    harness = make_harness(make_config(slots=6, max_chunk_tokens=16, max_steps_in_flight=steps_in_flight))
    first, *twins = (make_request(50, prompt_seed=1) for _ in range(num_twins + 1))
    harness.add(first, *twins)
    harness.run()
    assert_all_right(harness, first, *twins)
    assert num_prompt_computed(harness, first) == 50
    for twin in twins:
        assert num_prompt_computed(harness, twin) == 2
        timeline = harness.last(twin.request_id).timeline
        assert timeline is not None
        assert set(timeline.waited_s) == {WaitReason.PREFILL_TURN}


def test_one_who_waits_for_a_twin_stands_in_nobodys_way() -> None:
    harness = make_harness(make_config(slots=2, max_chunk_tokens=16))
    first, twin = (make_request(60, prompt_seed=1) for _ in range(2))
    other = make_request(6)
    harness.add(first, twin, other)
    harness.step()
    batch = harness.step()
    assert batch is not None
    assert {row.request_id for row in batch.rows} == {first.request_id, other.request_id}
    harness.run()
    assert_all_right(harness, first, twin, other)


@PIPELINES
@pytest.mark.parametrize("when", [1, 2, 3])
@pytest.mark.parametrize("how", ["cancelled", "preempted", "failed"])
def test_a_twin_goes_on_alone_when_the_first_goes(steps_in_flight: int, when: int, how: str) -> None:
    harness = make_harness(make_config(max_chunk_tokens=16, max_steps_in_flight=steps_in_flight))
    first, twin, other = make_request(60, prompt_seed=1), make_request(60, prompt_seed=1), make_request(4)
    if how == "failed":
        harness.runner.faults[when] = {first.request_id: StepFailedError("row")}
    harness.add(first, twin, other)
    for _ in range(when):
        harness.step()
    if how == "cancelled":
        harness.cancel(first.request_id)
    if how == "preempted":
        assert harness.scheduler.preempt_one(harness.clock.now_s)
    harness.run()
    assert_all_right(harness, twin, other, *([first] if how == "preempted" else []))
    # What the first one had finished was not computed twice.
    assert num_prompt_computed(harness, twin) <= 60 - 16 * (when - steps_in_flight)


def test_a_more_urgent_twin_does_not_wait_for_a_less_urgent_one() -> None:
    harness = make_harness(make_config(max_chunk_tokens=16))
    lazy = make_request(60, prompt_seed=1, priority=5)
    harness.add(lazy)
    harness.step()
    urgent = make_request(60, prompt_seed=1)
    harness.add(urgent)
    batch = harness.step()
    assert batch is not None
    assert [row.request_id for row in batch.rows] == [urgent.request_id]
    harness.run()
    assert_all_right(harness, lazy, urgent)


def test_a_little_in_common_is_not_worth_waiting_for() -> None:
    harness = make_harness(make_config(max_chunk_tokens=64))
    start = make_tokens(8, seed=1)
    requests = [make_request((*start, *make_tokens(20, seed=seed))) for seed in (2, 3)]
    harness.add(*requests)
    batch = harness.step()
    assert batch is not None
    assert len(batch.rows) == 2
    harness.run()
    assert_all_right(harness, *requests)


@PIPELINES
@pytest.mark.parametrize("prefix_cache", ["shared", "off"])
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9])
def test_forks_share_their_prompt_and_copy_the_block_they_write_to(
    steps_in_flight: int, prefix_cache: str, num_tokens: int
) -> None:
    harness = make_harness(make_config(prefix_cache=prefix_cache, max_steps_in_flight=steps_in_flight))
    first = make_request(num_tokens, temperature=1.0, seed=1, max_tokens=9)
    forks = [
        make_request(first.prompt_token_ids, fork_of=first.request_id, temperature=1.0, seed=seed, max_tokens=9)
        for seed in (2, 3)
    ]
    harness.add(first, *forks)
    harness.run()
    assert_all_right(harness, first, *forks)
    assert len({harness.answer(request.request_id) for request in (first, *forks)}) == 3
    for fork in forks:
        assert num_prompt_computed(harness, fork) == 1
        assert harness.last(fork.request_id).num_cached_tokens == num_tokens - 1
    num_copies = sum(len(batch.block_copies) for batch in harness.runner.batches)
    assert num_copies == (0 if num_tokens % 4 == 1 else 2)


@pytest.mark.parametrize("fork_of", ["gone", "stranger", "itself"])
def test_a_fork_of_nothing_real_is_an_ordinary_request(fork_of: str) -> None:
    harness = make_harness(make_config(prefix_cache="off"))
    stranger = make_request(9, request_id="stranger")
    fork = make_request(9, request_id="itself", fork_of=fork_of)
    harness.add(stranger, fork)
    harness.run()
    assert_all_right(harness, stranger, fork)
    assert num_prompt_computed(harness, fork) == 9


@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_forks_outlive_what_they_forked_from(when: int) -> None:
    harness = make_harness(make_config(prefix_cache="off", max_chunk_tokens=8))
    first = make_request(18)
    fork = make_request(first.prompt_token_ids, fork_of=first.request_id, temperature=1.0, seed=5)
    harness.add(first, fork)
    for _ in range(when):
        harness.step()
    harness.cancel(first.request_id)
    harness.run()
    assert_all_right(harness, fork)


def test_ten_questions_about_one_document_read_it_once() -> None:
    config = make_config(slots=10, num_blocks=256, block_size=16, max_model_len=2048, max_chunk_tokens=512)
    harness = make_harness(config)
    document = make_tokens(1200, seed=1)
    requests = [make_request((*document, *make_tokens(30, seed=10 + i)), max_tokens=12) for i in range(10)]
    harness.add(*requests)
    harness.step()
    num_peak = 0
    while harness.step() is not None:
        stats = harness.scheduler.stats(harness.clock.now_s)
        num_peak = max(num_peak, stats.num_blocks_total - stats.num_blocks_free - stats.num_blocks_cached)
    for request in requests[1:]:
        last = harness.last(request.request_id)
        assert num_prompt_computed(harness, request) < 0.05 * last.num_prompt_tokens
        assert last.num_cached_tokens == 1200
    # 75 blocks of the document, and 30 + 12 tokens of each question and answer.
    assert num_peak <= 75 + 10 * 3
    assert harness.scheduler.stats(0.0).num_cached_prompt_tokens == 9 * 1200


@pytest.mark.parametrize(
    ("prefix_cache", "changes", "is_shared"),
    [
        ("shared", {}, True),
        ("shared", {"user": "other"}, True),
        ("shared", {"cache_salt": "other"}, False),
        ("per-user", {}, True),
        ("per-user", {"user": "other"}, False),
        ("off", {}, False),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_who_may_share_with_whom(prefix_cache: str, changes: dict[str, str], is_shared: bool, at_once: bool) -> None:
    harness = make_harness(make_config(prefix_cache=prefix_cache, num_blocks=128))
    first = make_request(40, prompt_seed=1, user="one")
    second = make_request(40, prompt_seed=1, **({"user": "one"} | changes))  # type: ignore[arg-type]
    harness.add(first)
    if not at_once:
        harness.run()
    harness.add(second)
    harness.run()
    assert_all_right(harness, first, second)
    assert (harness.last(second.request_id).num_cached_tokens > 0) == is_shared


def test_a_step_that_failed_leaves_nothing_false_in_the_cache() -> None:
    harness = make_harness(make_config(max_chunk_tokens=16))
    first = make_request(30, prompt_seed=1)
    harness.runner.faults[1] = {first.request_id: StepFailedError("row")}
    harness.add(first)
    harness.run()
    second = make_request(30, prompt_seed=1)
    harness.add(second)
    harness.run()
    assert harness.last(second.request_id).num_cached_tokens == 16
    assert_all_right(harness, second)


def test_a_cache_that_was_dropped_is_computed_again() -> None:
    harness = make_harness()
    first, second = (make_request(30, prompt_seed=1) for _ in range(2))
    harness.add(first)
    harness.run()
    num_cached = harness.scheduler.stats(0.0).num_blocks_cached
    assert harness.scheduler.shrink_prefix_cache(2) == num_cached - 2
    harness.add(second)
    harness.run()
    assert harness.last(second.request_id).num_cached_tokens <= 8
    assert_all_right(harness, second)


@pytest.mark.parametrize("is_cached", [False, True])
def test_looking_a_prefix_up_is_linear_in_its_blocks(monkeypatch: pytest.MonkeyPatch, is_cached: bool) -> None:
    num_calls = 0
    plain = BlockPool.find

    def counting(pool: BlockPool, block_hash: bytes) -> int | None:
        nonlocal num_calls
        num_calls += 1
        return plain(pool, block_hash)

    monkeypatch.setattr(BlockPool, "find", counting)
    found: list[int] = []
    for num_blocks in (100, 200):
        config = make_config(num_blocks=num_blocks + 8, max_model_len=4 * num_blocks + 8, max_chunk_tokens=4096)
        harness = make_harness(config, checks=False)
        prompt = make_tokens(4 * num_blocks, seed=1)
        if is_cached:
            harness.add(make_request(prompt, max_tokens=1))
            harness.run()
        num_calls = 0
        harness.add(make_request(prompt, max_tokens=1))
        harness.run()
        found.append(num_calls)
    assert found[1] <= 2 * found[0] + 4
    assert found[1] <= 2 * 200 + 4


@pytest.mark.parametrize("prefix_cache", ["shared", "off"])
def test_a_fork_that_takes_its_firsts_slot_does_not_share_what_went_with_it(prefix_cache: str) -> None:
    harness = make_harness(make_config(slots=1, prefix_cache=prefix_cache))
    first = make_request(11, priority=1, max_tokens=20)
    harness.add(first)
    harness.step()
    harness.step()
    urgent = make_request(first.prompt_token_ids, fork_of=first.request_id, priority=0)
    harness.add(urgent)
    harness.run()
    assert_all_right(harness, first, urgent)
