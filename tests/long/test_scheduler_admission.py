"""Who may wait, who gets a slot, who goes first: reservations, bounds, passing, shares, priorities."""

from __future__ import annotations

import pytest

from engine.errors import AdmissionRefusedError, NeverFitsError
from engine.memory.kv_cache_manager import PrefixHit
from engine.request import EngineRequest
from engine.scheduler.admission import Admission, check_request
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.prefill_turn import MAX_TIMES_PASSED
from engine.scheduler.request_state import Request
from tests.builders import make_config, make_request
from tests.fakes import Harness, expected_answer, make_harness


def num_admitted(harness: Harness) -> int:
    harness.scheduler.schedule(0.0)
    return harness.scheduler.stats(0.0).num_running


def big_config(**changes: object) -> SchedulerConfig:
    """The machine of the worked figures: 102,000 positions in blocks of 16, room for 256 sequences."""
    values: dict[str, object] = {
        "slots": 256,
        "num_blocks": 6375,
        "block_size": 16,
        "max_model_len": 100_000,
        "admission_watermark_tokens": 100_000,
        "max_chunk_tokens": 512,
        "max_waiting_requests": 1000,
    }
    return make_config(**(values | changes))


def asked(number: int, num_prompt: int, max_tokens: int, **rest: object) -> list[EngineRequest]:
    return [make_request(num_prompt, max_tokens=max_tokens, **rest) for _ in range(number)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_offered", "watermark", "num_expected"), [(64, 100_000, 64), (128, 100_000, 82), (128, 0, 128)]
)
def test_a_request_reserves_its_prompt_and_its_answer_up_to_the_watermark(
    num_offered: int, watermark: int, num_expected: int
) -> None:
    """A request of 202 + 1,024 tokens takes 77 blocks: 6,375 // 77 = 82. Without a watermark 13 do."""
    harness = make_harness(big_config(admission_watermark_tokens=watermark), checks=False)
    harness.add(*asked(num_offered, 202, 1024))
    assert num_admitted(harness) == num_expected


def test_what_runs_keeps_what_it_was_promised() -> None:
    """40 sequences of 600 + 700 tokens were promised 82 blocks each: (6,375 - 3,280) // 77 = 40 more."""
    harness = make_harness(big_config(prefix_cache="off"), checks=False)
    harness.add(*asked(40, 600, 700))
    while harness.scheduler.stats(0.0).num_output_tokens < 40:
        harness.step()
    harness.add(*asked(128, 202, 1024))
    assert num_admitted(harness) == 80


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "num_slots"), [(57_088, 2048, 128), (109_132, 2048, 16), (14_900, 4096, 16)]
)
def test_full_length_sequences_are_admitted_all_at_once_where_they_fit(
    num_blocks: int, max_model_len: int, num_slots: int
) -> None:
    def admitted(num_blocks: int) -> int:
        config = big_config(num_blocks=num_blocks, max_model_len=max_model_len, slots=num_slots)
        harness = make_harness(config, checks=False)
        harness.add(*asked(num_slots, 100, max_model_len))
        return num_admitted(harness)

    assert admitted(num_blocks) == num_slots
    assert admitted(num_slots * max_model_len // 16) == num_slots
    assert admitted(num_slots * max_model_len // 16 - 1) == num_slots - 1


def test_more_than_the_whole_pool_is_refused_with_the_numbers() -> None:
    harness = make_harness(big_config(max_model_len=300_000), checks=False)
    with pytest.raises(NeverFitsError) as caught:
        harness.add(*asked(1, 199_000, 1_001))
    assert (caught.value.num_blocks_needed, caught.value.num_blocks_total) == (12_500, 6_375)
    harness.add(*asked(1, 101_000, 1_001))
    assert num_admitted(harness) == 1


@pytest.mark.parametrize(("num_prompt", "max_tokens", "num_blocks"), [(32, 32, 2), (33, 1, 2), (32, 2, 2)])
def test_a_request_that_could_not_even_resume_alone_is_refused(
    num_prompt: int, max_tokens: int, num_blocks: int
) -> None:
    """Two blocks of 16 hold a prompt of 32 and the one token that follows it, which is never computed."""
    config = big_config(num_blocks=num_blocks)
    with pytest.raises(NeverFitsError):
        check_request(make_request(num_prompt, max_tokens=max_tokens), config)
    assert check_request(make_request(32, max_tokens=1), config) == 33


def test_a_giant_that_just_fits_runs_alone_and_ends() -> None:
    harness = make_harness(make_config(num_blocks=32))
    small, giant, after = make_request(8), make_request(100, max_tokens=29), make_request(8)
    harness.add(small, giant, after)
    harness.run()
    for request in (small, giant, after):
        assert harness.answer(request.request_id) == expected_answer(request)


def test_the_queue_is_bounded_in_requests() -> None:
    harness = make_harness(make_config(slots=2, max_waiting_requests=3))
    harness.add(*asked(2, 4, 8))
    harness.step()
    harness.add(*asked(3, 4, 8))
    with pytest.raises(AdmissionRefusedError) as caught:
        harness.add(make_request(4))
    assert (caught.value.what, caught.value.limit, caught.value.given) == ("requests", 3, 4)
    assert caught.value.retry_after_s > 0.0
    assert harness.scheduler.stats(0.0).num_refused == 1
    harness.run()
    harness.add(make_request(4))


def test_the_queue_is_bounded_in_tokens() -> None:
    harness = make_harness(make_config(slots=1, max_waiting_tokens=30))
    harness.add(make_request(4))
    harness.step()
    harness.add(make_request(20))
    with pytest.raises(AdmissionRefusedError) as caught:
        harness.add(make_request(11))
    assert (caught.value.what, caught.value.limit, caught.value.given) == ("tokens", 30, 31)
    harness.add(make_request(10))


def test_without_a_queue_free_slots_are_still_given_out() -> None:
    harness = make_harness(make_config(slots=2, max_waiting_requests=0, max_waiting_tokens=0))
    harness.add(*asked(2, 4, 8))
    with pytest.raises(AdmissionRefusedError):
        harness.add(make_request(4))
    harness.run()
    harness.add(make_request(4))
    harness.scheduler.hold_admissions(True)
    with pytest.raises(AdmissionRefusedError):
        harness.add(make_request(4))


def test_a_preempted_request_is_never_refused() -> None:
    harness = make_harness(make_config(slots=2, max_waiting_requests=0))
    requests = asked(2, 4, 20)
    harness.add(*requests)
    harness.step()
    assert harness.scheduler.preempt_one(harness.clock.now_s)
    harness.run()
    for request in requests:
        assert harness.answer(request.request_id) == expected_answer(request)


def order_of_first_tokens(harness: Harness) -> list[str]:
    first_s = {}
    for request_id, outputs in harness.outputs.items():
        timeline = outputs[-1].timeline
        assert timeline is not None
        first_s[request_id] = timeline.first_token_s
    return sorted(first_s, key=lambda request_id: first_s[request_id] or 0.0)


def test_equals_are_served_in_order_of_arrival() -> None:
    harness = make_harness(make_config(slots=1))
    harness.add(*asked(5, 6, 3))
    harness.run()
    assert order_of_first_tokens(harness) == list(harness.outputs)


def test_the_more_urgent_goes_first_and_takes_the_slot_of_the_less_urgent() -> None:
    harness = make_harness(make_config(slots=1))
    batch_job, other_job = make_request(6, priority=9, max_tokens=30), make_request(6, priority=9)
    harness.add(batch_job, other_job)
    for _ in range(3):
        harness.step()
    urgent = make_request(6, priority=0)
    harness.add(urgent)
    batch = harness.step()
    assert batch is not None
    assert [row.request_id for row in batch.rows] == [urgent.request_id]
    harness.run()
    timeline = harness.last(batch_job.request_id).timeline
    assert timeline is not None
    assert timeline.num_preemptions == 1
    for request in (batch_job, other_job, urgent):
        assert harness.answer(request.request_id) == expected_answer(request)


def test_one_user_with_many_requests_does_not_keep_another_waiting() -> None:
    harness = make_harness(make_config(slots=4, num_blocks=256))
    flood = asked(30, 8, 40, user="agent")
    harness.add(*flood)
    for _ in range(5):
        harness.step()
    question = make_request(8, user="person")
    harness.add(question)
    batch = harness.step()
    assert batch is not None
    assert question.request_id in {row.request_id for row in batch.rows}
    harness.run()
    for request in (*flood, question):
        assert harness.answer(request.request_id) == expected_answer(request)


def test_a_fair_share_of_slots_is_left_alone() -> None:
    harness = make_harness(make_config(slots=4, num_blocks=256))
    harness.add(*asked(10, 8, 40, user="one"))
    harness.step()
    harness.add(*asked(10, 8, 40, user="two"))
    for _ in range(20):
        assert sorted(harness.users(harness.step())) == ["one", "one", "two", "two"]
    assert harness.scheduler.stats(0.0).num_preemptions == 2


def test_service_is_shared_by_tokens_not_by_requests() -> None:
    """One user sends long requests, the other short ones; in equal time both get about equally many tokens."""
    harness = make_harness(make_config(slots=1, num_blocks=256), checks=False)
    long, short = asked(30, 60, 30, user="long"), asked(220, 6, 6, user="short")
    harness.add(*long, *short)
    for _ in range(1500):
        harness.step()
    served = dict.fromkeys(("long", "short"), 0.0)
    for request in (*long, *short):
        outputs = harness.outputs[request.request_id]
        if outputs:
            served[request.user] += len(request.prompt_token_ids) + 2.0 * len(outputs)
    assert harness.scheduler.stats(0.0).num_waiting, "both have to be waiting until the end"
    assert 0.8 < served["short"] / served["long"] < 1.25


def test_idleness_cannot_be_saved_up() -> None:
    harness = make_harness(make_config(slots=1, num_blocks=256), checks=False)
    harness.add(*asked(60, 8, 8, user="steady"))
    for _ in range(200):
        harness.step()
    harness.add(*asked(30, 8, 8, user="newcomer"))
    users = [user for _ in range(160) for user in harness.users(harness.step())]
    assert 0.4 < users.count("newcomer") / len(users) < 0.6


def long_and_short(num_short: int) -> tuple[EngineRequest, list[EngineRequest]]:
    return make_request(400, max_tokens=2), asked(num_short, 12, 2)


def test_a_short_prompt_passes_a_long_one_that_is_being_read() -> None:
    harness = make_harness(make_config(num_blocks=256, max_model_len=512))
    long, (short,) = long_and_short(1)
    harness.add(long)
    harness.step()
    harness.add(short)
    batch = harness.step()
    assert batch is not None
    assert batch.rows[0].request_id == short.request_id
    harness.run()
    assert harness.answer(long.request_id) == expected_answer(long, max_model_len=512)


def test_a_long_prompt_is_passed_a_bounded_number_of_times() -> None:
    harness = make_harness(make_config(slots=2, num_blocks=256, max_model_len=512), checks=False)
    long, shorts = long_and_short(200)
    harness.add(long)
    harness.step()
    harness.add(*shorts)
    while not harness.outputs[long.request_id]:
        harness.step()
    num_before = sum(1 for request in shorts if harness.outputs[request.request_id])
    assert num_before == MAX_TIMES_PASSED


def test_prompts_that_pass_are_together_no_longer_than_the_one_they_pass() -> None:
    harness = make_harness(make_config(slots=2, num_blocks=256, max_model_len=512), checks=False)
    long, shorts = make_request(100, max_tokens=2), asked(50, 30, 2)
    harness.add(long)
    harness.step()
    harness.add(*shorts)
    while not harness.outputs[long.request_id]:
        harness.step()
    assert 1 <= sum(1 for request in shorts if harness.outputs[request.request_id]) <= 100 // 30


def test_a_head_that_waits_for_blocks_is_passed_a_bounded_number_of_times() -> None:
    """[small, giant, small, small, ...]: the giant gets its turn although the small ones would go on fitting."""
    harness = make_harness(make_config(slots=4, num_blocks=32, max_model_len=128), checks=False)
    harness.add(make_request(40, max_tokens=60))
    harness.step()
    giant, smalls = make_request(100, max_tokens=4), asked(200, 8, 4)
    harness.add(giant, *smalls)
    harness.run()
    started_s = [prefill_started_s(harness, request) for request in smalls]
    assert sum(1 for at_s in started_s if at_s < prefill_started_s(harness, giant)) == 100 // 8
    assert harness.answer(giant.request_id) == expected_answer(giant)


def prefill_started_s(harness: Harness, request: EngineRequest) -> float:
    timeline = harness.last(request.request_id).timeline
    assert timeline is not None
    assert timeline.prefill_started_s is not None
    return timeline.prefill_started_s


def test_nobody_starves_while_others_keep_coming() -> None:
    """Shorts arrive faster than they can be served, for ever; each long prompt is answered all the same."""
    harness = make_harness(make_config(slots=2, num_blocks=64, max_waiting_requests=40), checks=False)
    longs = asked(3, 100, 4)
    harness.add(*longs)
    for _ in range(1500):
        for request in asked(2, 8, 4):
            try:
                harness.add(request)
            except AdmissionRefusedError:
                break
        harness.step()
    for request in longs:
        assert harness.answer(request.request_id) == expected_answer(request)


def test_the_predicted_wait_grows_with_the_queue() -> None:
    harness = make_harness(make_config(slots=2, num_blocks=256))
    assert harness.scheduler.stats(0.0).predicted_wait_s is None
    harness.add(*asked(4, 8, 8))
    harness.run()
    predictions = []
    for _ in range(5):
        harness.add(*asked(4, 8, 8))
        prediction = harness.scheduler.stats(harness.clock.now_s).predicted_wait_s
        assert prediction is not None
        predictions.append(prediction)
    assert predictions == sorted(set(predictions))


@pytest.mark.parametrize("binding", ["slots", "blocks"])
def test_a_step_looks_at_few_of_many_waiting(monkeypatch: pytest.MonkeyPatch, binding: str) -> None:
    """What a step examines does not depend on how many wait."""
    examined: list[str] = []
    plain = Admission._longest_hit

    def counting(admission: Admission, request: Request) -> PrefixHit:
        examined.append(request.request_id)
        return plain(admission, request)

    monkeypatch.setattr(Admission, "_longest_hit", counting)
    config = make_config(slots=2 if binding == "slots" else 4, num_blocks=32, max_waiting_requests=2000)
    harness = make_harness(config, checks=False)
    harness.add(*asked(2, 40, 20))
    harness.step()
    harness.add(*asked(1000, 45, 30))
    examined.clear()
    harness.step()
    assert harness.scheduler.stats(0.0).waiting_on == {binding: 1000}
    assert len(examined) <= 16
