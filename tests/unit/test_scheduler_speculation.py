"""Guessed tokens: where they come from, when they are tried, and that they change nothing but the number of steps."""

from __future__ import annotations

import random

import pytest

from engine.batch import StepBatch
from engine.request import Grammar
from engine.scheduler.prompt_lookup import DraftRecord, PromptLookup
from engine.scheduler.speculation import DraftCosts
from tests.builders import make_config, make_request
from tests.fakes import Harness, expected_answer, make_harness, repeating_token


def test_a_text_goes_on_as_it_did_before() -> None:
    text = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3]
    assert PromptLookup().guess(text, 3) == (4, 5, 6)
    assert PromptLookup().guess(text, 5) == (4, 5, 6, 9, 1)
    assert PromptLookup().guess(text[:-1], 3) == ()


def test_the_latest_of_several_places_counts() -> None:
    assert PromptLookup().guess([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 1) == (5,)


def test_what_repeats_is_guessed_to_go_on_repeating() -> None:
    assert PromptLookup().guess([7, 1, 2, 1, 2, 1, 2], 5) == (1, 2, 1, 2, 1)
    assert PromptLookup().guess([4, 4, 4, 4], 3) == (4, 4, 4)


@pytest.mark.parametrize("text", [[], [1], [1, 1], [1, 1, 1], [1, 2, 3]])
def test_short_texts_say_nothing(text: list[int]) -> None:
    assert PromptLookup().guess(text, 4) == ()


def test_growing_gives_what_a_fresh_look_gives() -> None:
    rng = random.Random(0)
    lookup, text = PromptLookup(), [rng.randrange(4) for _ in range(10)]
    for _ in range(300):
        assert lookup.guess(text, 6) == PromptLookup().guess(text, 6)
        text += [rng.randrange(4) for _ in range(rng.randrange(1, 5))]


def test_the_hit_rate_is_learnt_without_trying() -> None:
    right, wrong = DraftRecord(), DraftRecord()
    for length in range(8, 60):
        right.saw(([1, 2, 3, 4] * 20)[:length], guess_again=True)
        wrong.saw([*([1, 2, 3] * 20)[: length - 1], length + 100], guess_again=True)
    assert right.hit_rate == 0.95
    assert wrong.expected is None
    assert wrong.hit_rate == 0.5


def test_costs_are_known_where_they_were_measured_and_guessed_nearby() -> None:
    costs = DraftCosts()
    assert costs.ratio(1, 4) == pytest.approx(1.4)
    for ratio in (1.2, 1.2, 9.0):
        costs.observe(1, 4, ratio)
    assert costs.ratio(1, 4) == 1.2
    assert costs.ratio(1, 8) == pytest.approx(1.4)
    assert costs.ratio(2, 2) == pytest.approx(1.1)


def test_an_entry_that_always_says_no_is_measured_again() -> None:
    costs = DraftCosts()
    costs.observe(1, 4, 50.0)
    for _ in range(127):
        costs.rejected(1, 4)
    assert costs.ratio(1, 4) == 50.0
    costs.rejected(1, 4)
    assert costs.ratio(1, 4) == pytest.approx(1.4)


def cheap_tokens(batch: StepBatch) -> float:
    return 0.050 + 0.0005 * batch.num_tokens


def dear_tokens(batch: StepBatch) -> float:
    return 0.050 * batch.num_tokens


def repeating_harness(max_draft_tokens: int = 8, **changes: object) -> Harness:
    runner = {key: changes.pop(key) for key in ("step_time", "choose") if key in changes}
    config = make_config(max_draft_tokens=max_draft_tokens, max_model_len=1024, num_blocks=512, **changes)
    return make_harness(config, **({"choose": repeating_token, "step_time": cheap_tokens} | runner))


def check_answers(harness: Harness) -> None:
    for request_id, request in harness.requests.items():
        assert harness.answer(request_id) == expected_answer(
            request, max_model_len=1024, choose=harness.runner.choose
        ), request_id


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_equal_and_take_fewer_steps(steps_in_flight: int, temperature: float) -> None:
    num_steps = {}
    for max_draft_tokens in (0, 8):
        harness = repeating_harness(max_draft_tokens, max_steps_in_flight=steps_in_flight)
        harness.add(make_request(20, max_tokens=200, temperature=temperature, seed=5, prompt_seed=1))
        harness.run()
        check_answers(harness)
        num_steps[max_draft_tokens] = len(harness.runner.batches)
    assert num_steps[8] < 0.7 * num_steps[0]


def test_several_rows_share_what_the_slots_have_room_for() -> None:
    harness = repeating_harness(slots=8)
    harness.add(*(make_request(20, max_tokens=100, prompt_seed=seed) for seed in range(3)))
    harness.run()
    check_answers(harness)
    assert max(len(batch.rows) for batch in harness.runner.batches if any(r.draft_token_ids for r in batch.rows)) == 3
    assert all(batch.num_tokens <= 8 for batch in harness.runner.batches if any(r.draft_token_ids for r in batch.rows))


def test_full_slots_are_left_alone() -> None:
    harness = repeating_harness(slots=4)
    harness.add(*(make_request(20, max_tokens=60, prompt_seed=seed) for seed in range(4)))
    for _ in range(40):
        harness.step()
        assert not any(row.draft_token_ids for row in harness.runner.batches[-1].rows)


def test_guesses_stop_where_they_do_not_pay() -> None:
    harness = repeating_harness(step_time=dear_tokens)
    harness.add(make_request(20, max_tokens=600, prompt_seed=1))
    harness.run()
    check_answers(harness)
    stats = harness.scheduler.stats(0.0)
    assert 0 < stats.num_draft_tokens < 60
    cheap = repeating_harness()
    cheap.add(make_request(20, max_tokens=600, prompt_seed=1))
    cheap.run()
    assert cheap.scheduler.stats(0.0).num_draft_tokens > 300
    assert 0.5 < cheap.scheduler.stats(0.0).num_accepted_tokens / cheap.scheduler.stats(0.0).num_draft_tokens < 1.0


def test_texts_that_do_not_repeat_are_left_alone() -> None:
    harness = make_harness(make_config(max_draft_tokens=8, max_model_len=1024, num_blocks=512), step_time=cheap_tokens)
    harness.add(make_request(20, max_tokens=300))
    harness.run()
    check_answers(harness)
    assert harness.scheduler.stats(0.0).num_draft_tokens < 10


@pytest.mark.parametrize(
    "sampling",
    [
        {"grammar": Grammar("regex", "a+")},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": ((1, 2.0),)},
    ],
)
def test_what_depends_on_more_than_the_tokens_before_is_not_guessed(sampling: dict[str, object]) -> None:
    harness = repeating_harness()
    harness.add(make_request(20, max_tokens=100, **sampling))
    harness.run()
    check_answers(harness)
    assert harness.scheduler.stats(0.0).num_draft_tokens == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9, 10, 33])
def test_no_token_comes_after_the_last(max_tokens: int) -> None:
    harness = repeating_harness()
    harness.add(make_request([1, 2, 3, 4] * 6, max_tokens=max_tokens))
    harness.run()
    check_answers(harness)
    assert len(harness.answer(next(iter(harness.requests)))) == max_tokens


def test_an_answer_that_ends_among_right_guesses_leaves_its_blocks_to_the_next_turn() -> None:
    harness = repeating_harness(choose=lambda tokens, *_: 1 + len(tokens) % 3, eos_token_ids=())
    harness.add(make_request(24, max_tokens=41, prompt_seed=1, request_id="first"))
    harness.run()
    prompt = [*harness.requests["first"].prompt_token_ids, *harness.answer("first")]
    harness.add(make_request(prompt, max_tokens=4, request_id="second"))
    harness.run()
    assert harness.scheduler.stats(0.0).num_accepted_tokens > 20
    assert harness.last("second").num_cached_tokens == 64
