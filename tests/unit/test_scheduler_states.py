"""Recurrent state between requests: what a prefix hit, the next turn and a preempted request go on from.

The fake runner keeps a state for every slot and asserts that a row goes on from that of its own tokens.
"""

from __future__ import annotations

import pytest

from engine.batch import StepBatch
from tests.builders import make_config, make_request, make_tokens
from tests.fakes import Harness, expected_answer, make_harness

BLOCK_SIZE = 4


def harness_with_states(num_state_snapshots: int = 12, **changes: object) -> Harness:
    return make_harness(make_config(num_state_snapshots=num_state_snapshots, **changes))


def num_computed(batches: list[StepBatch], request_id: str) -> int:
    return sum(row.num_tokens for batch in batches for row in batch.rows if row.request_id == request_id)


def computed_of(harness: Harness, prompt: tuple[int, ...], max_tokens: int = 8) -> tuple[int, tuple[int, ...]]:
    """Ask, run to the end, check the answer; how many tokens were computed for it."""
    request = make_request(prompt, max_tokens=max_tokens)
    harness.add(request)
    harness.run()
    assert harness.answer(request.request_id) == expected_answer(request)
    return num_computed(harness.runner.batches, request.request_id), harness.answer(request.request_id)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_the_next_turn_goes_on_from_the_answers_last_block(steps_in_flight: int) -> None:
    harness = harness_with_states(max_steps_in_flight=steps_in_flight)
    prompt = make_tokens(50, seed=1)
    first, answer = computed_of(harness, prompt, max_tokens=20)
    assert first == 50 + 19
    follow_up = (*prompt, *answer, *make_tokens(3, seed=2))
    again, _ = computed_of(harness, follow_up, max_tokens=2)
    # The last whole block that the first turn computed ends at 68.
    assert again == len(follow_up) - 68 + 1


def test_an_equal_prompt_computes_what_follows_its_last_whole_block() -> None:
    harness = harness_with_states()
    prompt = make_tokens(40, seed=1)
    computed_of(harness, prompt, max_tokens=1)
    again, _ = computed_of(harness, prompt, max_tokens=1)
    assert again == 40 - 36


def test_where_a_prompt_branches_off_the_state_is_saved_for_the_next_one() -> None:
    harness = harness_with_states(max_chunk_tokens=64)
    document = make_tokens(42, seed=1)
    questions = [(*document, *make_tokens(9, seed=n)) for n in (2, 3, 4)]
    computed = [computed_of(harness, question, max_tokens=1)[0] for question in questions]
    # The second finds the blocks of the document and no state at its end; it leaves one there.
    assert computed == [51, 51, 51 - 40]


def test_a_preempted_request_goes_on_from_its_last_whole_block() -> None:
    harness = harness_with_states()
    request, other = make_request(30, max_tokens=20), make_request(30, max_tokens=40)
    harness.add(request, other)
    while harness.scheduler.stats(0.0).num_output_tokens < 20:
        harness.step()
    num_before = sum(num_computed(harness.runner.batches, r.request_id) for r in (request, other))
    assert harness.scheduler.preempt_one(0.0)
    harness.run()
    total = sum(num_computed(harness.runner.batches, r.request_id) for r in (request, other))
    assert num_before < total <= 30 + 19 + 30 + 39 + BLOCK_SIZE
    for each in (request, other):
        assert harness.answer(each.request_id) == expected_answer(each)


def test_what_a_request_keeps_does_not_grow_with_its_length() -> None:
    harness = harness_with_states(num_state_snapshots=40)
    computed_of(harness, make_tokens(30, seed=1), max_tokens=90)
    states = harness.scheduler._residency.states
    assert states is not None
    assert states.book.num_saved == 2


@pytest.mark.parametrize("changes", [{"prefix_cache": "off"}, {"num_state_snapshots": 0}])
def test_without_room_for_states_nothing_is_shared(changes: dict[str, object]) -> None:
    harness = harness_with_states(**changes)  # type: ignore[arg-type]
    prompt = make_tokens(20, seed=1)
    assert [computed_of(harness, prompt, max_tokens=1)[0] for _ in range(2)] == [20, 20]
    assert not any(batch.state_saves or batch.state_loads for batch in harness.runner.batches)


def test_forks_share_the_prompt_by_its_saved_state() -> None:
    harness = harness_with_states()
    prompt = make_tokens(22, seed=1)
    first = make_request(prompt, max_tokens=6, temperature=1.0, seed=1)
    forks = [
        make_request(prompt, max_tokens=6, temperature=1.0, seed=seed, fork_of=first.request_id) for seed in (2, 3)
    ]
    harness.add(first, *forks)
    harness.run()
    for request in (first, *forks):
        assert harness.answer(request.request_id) == expected_answer(request)
    assert [num_computed(harness.runner.batches, fork.request_id) for fork in forks] == [2 + 5, 2 + 5]
