"""One step after the other: order in a step, chunks, stop rules, ends of every kind, steps in flight, times."""

from __future__ import annotations

import pytest

from engine.batch import StepBatch, StepOutput
from engine.errors import (
    ContextLengthError,
    DeadlineExceededError,
    InvalidParameterError,
    NeverFitsError,
    StepFailedError,
)
from engine.request import FinishReason, WaitReason
from tests.builders import EOS, make_config, make_request, make_tokens
from tests.fakes import expected_answer, make_harness

PIPELINES = pytest.mark.parametrize("steps_in_flight", [1, 2, 3])


def shape(batch: StepBatch | None) -> list[tuple[int, int, bool]]:
    """Start, tokens and whether it samples, row by row."""
    assert batch is not None
    return [(row.start, row.num_tokens, row.samples) for row in batch.rows]


def test_a_prompt_is_read_in_chunks_and_then_decoded_one_by_one() -> None:
    harness = make_harness(make_config(max_chunk_tokens=16))
    request = make_request(40, max_tokens=3)
    harness.add(request)
    assert [shape(harness.step()) for _ in range(5)] == [
        [(0, 16, False)],
        [(16, 16, False)],
        [(32, 8, True)],
        [(40, 1, True)],
        [(41, 1, True)],
    ]
    assert harness.step() is None
    assert harness.answer(request.request_id) == expected_answer(request)


def test_decode_rows_come_first_and_chunks_take_the_rest() -> None:
    harness = make_harness(make_config(max_chunk_tokens=16))
    harness.add(make_request(4))
    harness.step()
    harness.add(make_request(20))
    assert shape(harness.step()) == [(4, 1, True), (0, 16, False)]
    assert shape(harness.step()) == [(5, 1, True), (16, 4, True)]
    assert shape(harness.step()) == [(6, 1, True), (20, 1, True)]


def test_short_prompts_share_one_step() -> None:
    harness = make_harness(make_config(max_chunk_tokens=16))
    harness.add(*(make_request(5) for _ in range(3)))
    assert shape(harness.step()) == [(0, 5, True), (0, 5, True), (0, 5, True)]


def test_a_scrap_of_a_prompt_is_not_worth_a_row() -> None:
    harness = make_harness(make_config(max_chunk_tokens=32))
    harness.add(make_request(30), make_request(30))
    assert shape(harness.step()) == [(0, 30, True)]


def test_rows_name_slots_and_the_place_in_the_answer() -> None:
    harness = make_harness(make_config(slots=2))
    harness.add(make_request(4, seed=9), make_request(4), make_request(4))
    batch = harness.step()
    assert batch is not None
    assert [(row.slot, row.output_index) for row in batch.rows] == [(0, 0), (1, 0)]
    assert batch.rows[0].seed == 9
    batch = harness.step()
    assert batch is not None
    assert [row.output_index for row in batch.rows] == [1, 1]
    assert batch.step_index == 1


@PIPELINES
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_the_answer_ends_at_max_tokens(steps_in_flight: int, max_tokens: int) -> None:
    harness = make_harness(make_config(max_steps_in_flight=steps_in_flight))
    request = make_request(5, max_tokens=max_tokens)
    harness.add(request)
    harness.run()
    last = harness.last(request.request_id)
    assert harness.answer(request.request_id) == expected_answer(request)
    assert last.finish_reason is FinishReason.LENGTH
    assert last.num_prompt_tokens == 5
    # No step ran for a token that max_tokens excludes.
    assert sum(batch.num_tokens for batch in harness.runner.batches) == 5 + max_tokens - 1


@PIPELINES
def test_the_answer_ends_where_the_context_does(steps_in_flight: int) -> None:
    harness = make_harness(make_config(max_model_len=12, max_steps_in_flight=steps_in_flight))
    request = make_request(9, max_tokens=100)
    harness.add(request)
    harness.run()
    assert len(harness.answer(request.request_id)) == 3
    assert harness.last(request.request_id).finish_reason is FinishReason.LENGTH


@PIPELINES
@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_stop_token_ends_the_answer_and_is_part_of_it(steps_in_flight: int, place: int) -> None:
    plain = make_request(6, prompt_seed=1, max_tokens=20)
    stop = expected_answer(plain)[place]
    request = make_request(plain.prompt_token_ids, max_tokens=20, stop_token_ids=(stop,))
    neighbour = make_request(6, max_tokens=12)
    harness = make_harness(make_config(max_steps_in_flight=steps_in_flight))
    harness.add(request, neighbour)
    harness.run()
    assert harness.answer(request.request_id) == expected_answer(plain)[: place + 1]
    assert harness.last(request.request_id).finish_reason is FinishReason.STOP
    assert harness.answer(neighbour.request_id) == expected_answer(neighbour)


def test_end_of_sequence_ends_unless_it_is_to_be_ignored() -> None:
    prompt = next(p for p in (make_tokens(6, seed=i) for i in range(10_000)) if EOS in ends(p))
    stopping, ignoring = make_request(prompt, ignore_eos=False), make_request(prompt, ignore_eos=True)
    harness = make_harness()
    harness.add(stopping, ignoring)
    harness.run()
    assert harness.answer(stopping.request_id)[-1] == EOS
    assert harness.last(stopping.request_id).finish_reason is FinishReason.STOP
    assert len(harness.answer(ignoring.request_id)) == 8


def ends(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return expected_answer(make_request(prompt))[:7]


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (make_request(()), InvalidParameterError, "empty"),
        (make_request(4, max_tokens=0), InvalidParameterError, "max_tokens is 0"),
        (make_request(128), ContextLengthError, "128"),
        (make_request(60, max_tokens=30), NeverFitsError, "23 KV blocks .* has 20"),
    ],
)
def test_what_can_never_be_answered_is_refused_at_once(request_: object, error: type, words: str) -> None:
    harness = make_harness(make_config(num_blocks=20))
    with pytest.raises(error, match=words):
        harness.scheduler.add(request_, 0.0)  # type: ignore[arg-type]
    assert not harness.scheduler.has_unfinished
    harness.scheduler.check_invariants()


def test_the_last_token_of_an_answer_needs_no_room() -> None:
    harness = make_harness(make_config(num_blocks=20))
    fits = make_request(60, max_tokens=21)
    harness.add(fits)
    harness.run()
    assert len(harness.answer(fits.request_id)) == 21


def test_an_id_in_use_is_refused() -> None:
    harness = make_harness()
    harness.add(make_request(4, request_id="same"))
    with pytest.raises(InvalidParameterError, match="'same'"):
        harness.scheduler.add(make_request(4, request_id="same"), 0.0)


@PIPELINES
def test_an_id_can_be_used_again_and_gets_its_own_answer(steps_in_flight: int) -> None:
    harness = make_harness(make_config(max_steps_in_flight=steps_in_flight))
    harness.add(make_request(4, request_id="same"), make_request(6))
    harness.step()
    harness.step()
    harness.cancel("same")
    if steps_in_flight > 1:
        with pytest.raises(InvalidParameterError):
            harness.scheduler.add(make_request(4, request_id="same"), 0.0)
    while "same" not in harness.runner.released:
        harness.step()
    again = make_request(5, request_id="same")
    harness.add(again)
    harness.run()
    assert harness.answer("same") == expected_answer(again)


@PIPELINES
def test_cancel_frees_the_slot_at_once_and_the_late_result_is_dropped(steps_in_flight: int) -> None:
    harness = make_harness(make_config(slots=1, max_steps_in_flight=steps_in_flight))
    first, second = make_request(6, max_tokens=50), make_request(6)
    harness.add(first, second)
    for _ in range(4):
        harness.step()
    num_given_out = len(harness.outputs[first.request_id])
    assert harness.cancel(first.request_id)
    assert not harness.cancel(first.request_id)
    batch = harness.step()
    assert batch is not None
    assert [row.request_id for row in batch.rows] == [second.request_id]
    harness.run()
    assert len(harness.outputs[first.request_id]) == num_given_out
    assert harness.answer(second.request_id) == expected_answer(second)
    assert harness.scheduler.stats(0.0).num_cancelled == 1


@PIPELINES
def test_blocks_of_a_row_in_flight_do_not_change_hands(steps_in_flight: int) -> None:
    """The pool has room for one: the second may only start once the first one's last row is over."""
    config = make_config(slots=2, num_blocks=4, max_model_len=16, max_steps_in_flight=steps_in_flight)
    harness = make_harness(config)
    first, second = make_request(9, max_tokens=6), make_request(9, max_tokens=6)
    harness.add(first, second)
    for _ in range(3):
        harness.step()
    harness.cancel(first.request_id)
    held = harness.scheduler.stats(0.0)
    num_available = held.num_blocks_free + held.num_blocks_cached
    assert num_available == (4 if steps_in_flight == 1 else 1)
    harness.run()
    assert harness.answer(second.request_id) == expected_answer(second)


def test_a_request_past_its_deadline_ends_wherever_it_is() -> None:
    harness = make_harness(make_config(slots=1))
    running, waiting, patient = (
        make_request(4, max_tokens=100, deadline_s=deadline_s) for deadline_s in (0.1, 0.2, None)
    )
    harness.add(running, waiting, patient)
    for _ in range(20):
        harness.step()
    for late in (running, waiting):
        last = harness.last(late.request_id)
        assert last.finish_reason is FinishReason.ERROR
        assert isinstance(last.error, DeadlineExceededError)
        assert last.timeline is not None
        assert last.timeline.finished_s is not None
        assert last.timeline.finished_s >= (late.deadline_s or 0.0)
    assert harness.answer(patient.request_id)


def test_a_request_done_in_time_has_no_deadline_left() -> None:
    harness = make_harness()
    harness.add(make_request(4, request_id="same", deadline_s=5.0))
    harness.run()
    harness.add(make_request(4, request_id="same"))
    assert harness.scheduler.expire(10.0) == []


@PIPELINES
def test_a_failed_row_ends_alone(steps_in_flight: int) -> None:
    harness = make_harness(make_config(max_steps_in_flight=steps_in_flight))
    failing, other = make_request(4), make_request(4)
    harness.runner.faults[3] = {failing.request_id: StepFailedError("bad row")}
    harness.add(failing, other)
    harness.run()
    last = harness.last(failing.request_id)
    assert last.finish_reason is FinishReason.ERROR
    assert str(last.error) == "bad row"
    assert harness.answer(other.request_id) == expected_answer(other)
    assert harness.scheduler.stats(0.0).num_failed == 1


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_step_that_raises_ends_its_requests_and_no_others(steps_in_flight: int) -> None:
    harness = make_harness(make_config(slots=2, max_steps_in_flight=steps_in_flight))
    first, second, waiting = (make_request(12) for _ in range(3))
    harness.runner.faults[2] = StepFailedError("device lost")
    harness.add(first, second, waiting)
    harness.run()
    assert isinstance(harness.last(first.request_id).error, StepFailedError)
    assert isinstance(harness.last(second.request_id).error, StepFailedError)
    assert harness.answer(waiting.request_id) == expected_answer(waiting)
    stats = harness.scheduler.stats(0.0)
    assert stats.num_blocks_free + stats.num_blocks_cached == stats.num_blocks_total


def test_a_step_without_the_token_it_owes_is_a_failure() -> None:
    harness = make_harness()
    harness.add(make_request(4))
    batch = harness.scheduler.schedule(0.0)
    assert batch is not None
    outputs = harness.scheduler.update(batch, StepOutput(batch.step_index, {}, 0.01), 0.01)
    assert isinstance(outputs[0].error, StepFailedError)


def test_fail_all_ends_everybody_with_the_reason() -> None:
    harness = make_harness(make_config(slots=1))
    requests = [make_request(4) for _ in range(3)]
    harness.add(*requests)
    harness.step()
    error = StepFailedError("going down")
    outputs = harness.scheduler.fail_all(error, 1.0)
    assert {output.request_id for output in outputs} == {request.request_id for request in requests}
    assert all(output.error is error for output in outputs)
    assert not harness.scheduler.has_unfinished
    harness.scheduler.check_invariants()


def test_with_a_step_in_flight_the_host_is_one_token_behind() -> None:
    harness = make_harness(make_config(max_steps_in_flight=2))
    request = make_request(4, max_tokens=6)
    harness.add(request)
    harness.launch()
    batch = harness.launch()
    assert batch is not None
    row = batch.rows[0]
    assert (row.start, row.num_tokens, row.samples, row.output_index) == (4, 1, True, 1)
    assert len(row.token_ids) == 4
    harness.land()
    assert len(harness.answer(request.request_id)) == 1
    assert harness.launch() is not None
    harness.land()
    harness.run()
    assert harness.answer(request.request_id) == expected_answer(request)


def test_what_a_request_waited_for_adds_up_to_its_wait() -> None:
    harness = make_harness(make_config(slots=1, max_chunk_tokens=8))
    first, second = make_request(20, max_tokens=5), make_request(20, received_s=0.01)
    harness.add(first)
    harness.step()
    harness.add(second)
    harness.run()
    timeline = harness.last(second.request_id).timeline
    assert timeline is not None
    assert timeline.admitted_s is not None
    assert timeline.prefill_started_s is not None
    assert timeline.first_token_s is not None
    assert timeline.finished_s == harness.clock.now_s
    assert timeline.received_s < timeline.admitted_s <= timeline.prefill_started_s < timeline.first_token_s
    assert set(timeline.waited_s) == {WaitReason.SLOTS, WaitReason.PREFILL_TURN}
    assert sum(timeline.waited_s.values()) == pytest.approx(timeline.prefill_started_s - timeline.received_s)


def test_held_admissions_wait_for_headroom_and_resume() -> None:
    harness = make_harness()
    running, held = make_request(4, max_tokens=4), make_request(4)
    harness.add(running)
    harness.step()
    harness.scheduler.hold_admissions(True)
    harness.add(held)
    while harness.step() is not None:
        assert harness.scheduler.stats(0.0).num_running <= 1
    assert harness.scheduler.stats(0.0).waiting_on == {"headroom": 1}
    assert harness.last(running.request_id)
    harness.clock.advance(3.0)
    harness.scheduler.hold_admissions(False)
    harness.run()
    timeline = harness.last(held.request_id).timeline
    assert timeline is not None
    assert timeline.waited_s[WaitReason.HEADROOM] >= 3.0


def test_logprobs_ride_with_their_tokens() -> None:
    harness = make_harness()
    request = make_request(4, num_logprobs=0, max_tokens=3)
    harness.add(request)
    harness.run()
    outputs = harness.outputs[request.request_id]
    assert [o.logprobs[0].token_id for o in outputs] == [o.token_ids[0] for o in outputs]


def test_the_numbers_add_up() -> None:
    harness = make_harness(make_config(slots=2))
    requests = [make_request(8, max_tokens=4) for _ in range(5)]
    harness.add(*requests)
    harness.step()
    stats = harness.scheduler.stats(harness.clock.now_s)
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (2, 3, 24)
    assert stats.waiting_on == {"slots": 3}
    harness.cancel(requests[4].request_id)
    harness.run()
    stats = harness.scheduler.stats(harness.clock.now_s)
    assert (stats.num_finished, stats.num_cancelled, stats.peak_running) == (4, 1, 2)
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (32, 16)
    assert stats.num_steps == len(harness.runner.batches)
    assert sorted(harness.runner.released) == sorted(request.request_id for request in requests[:4])
