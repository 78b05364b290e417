"""Preemption: whose turn it is to go, and that nobody can tell from the answer."""

from __future__ import annotations

import pytest

from engine.memory.kv_cache_manager import BlockTable
from engine.request import EngineRequest, SamplingParams, WaitReason
from engine.scheduler.fairness import FairShares
from engine.scheduler.preemption import IMMUNE_TOKENS, choose_for_blocks, choose_for_slot, is_immune
from engine.scheduler.request_state import Request
from tests.builders import make_config, make_request
from tests.fakes import Harness, expected_answer, make_harness

PIPELINES = pytest.mark.parametrize("steps_in_flight", [1, 2, 3])


def running(*progress: int, immune: tuple[int, ...] = (), priority: dict[int, int] | None = None) -> list[Request]:
    """Requests in slots 0, 1, ... with so many answer tokens; those of ``immune`` resumed just now."""
    requests = []
    for slot, num_output in enumerate(progress):
        asked = EngineRequest(str(slot), (1,), SamplingParams(), 0.0, (priority or {}).get(slot, 0))
        request = Request(asked, slot, BlockTable(b""), 1000, 0)
        request.slot = slot
        request.token_ids += [1] * num_output
        request.immune_until_output = num_output + 1 if slot in immune else 0
        requests.append(request)
    return requests


@pytest.mark.parametrize(
    ("progress", "immune", "victim"),
    [
        ((5, 2, 9), (), 1),
        ((7, 3, 12), (), 1),
        ((3, 9), (0,), 1),
        ((4, 2), (0, 1), 1),
        ((6, 6, 6), (), 0),
        ((0, 8), (), 0),
    ],
)
def test_the_victim_has_answered_least_and_is_not_immune(
    progress: tuple[int, ...], immune: tuple[int, ...], victim: int
) -> None:
    chosen = choose_for_blocks(running(*progress, immune=immune))
    assert chosen is not None
    assert chosen.slot == victim


def test_immunity_ends_after_its_tokens() -> None:
    request = running(67)[0]
    request.immune_until_output = 67
    assert not is_immune(request)
    request.immune_until_output = 68
    assert is_immune(request)


def test_the_less_urgent_goes_first() -> None:
    chosen = choose_for_blocks(running(5, 50, priority={1: 3}))
    assert chosen is not None
    assert chosen.slot == 1


def test_who_makes_way_for_a_slot() -> None:
    shares = FairShares()
    for user in ("", "", "", "new"):
        shares.enter(user)
    shares[""].num_in_slots = 2
    waiting = Request(EngineRequest("w", (1,), SamplingParams(), 0.0, user="new"), 9, BlockTable(b""), 10, 0)

    def chosen(immune: tuple[int, ...], num_slots: int = 2) -> int | None:
        victim = choose_for_slot(waiting, running(3, 1, immune=immune), shares, num_slots)
        return None if victim is None else victim.slot

    assert chosen(()) == 1
    assert chosen((1,)) == 0
    assert chosen((0, 1)) == 1
    assert chosen((), num_slots=4) is None, "two of four slots are a fair share"
    shares["new"].num_in_slots = 1
    assert chosen(()) is None, "who holds a fair share takes nobody's"


def tight(steps_in_flight: int = 1, **changes: object) -> Harness:
    """Four slots, and blocks for about two of the sequences below."""
    values: dict[str, object] = {"num_blocks": 24, "max_model_len": 64, "admission_watermark_tokens": 0}
    return make_harness(make_config(max_steps_in_flight=steps_in_flight, **(values | changes)))


@PIPELINES
@pytest.mark.parametrize("prefix_cache", ["shared", "off"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nobody_can_tell_from_the_answer(steps_in_flight: int, prefix_cache: str, temperature: float) -> None:
    harness = tight(steps_in_flight, prefix_cache=prefix_cache)
    requests = [make_request(20, max_tokens=30, temperature=temperature, seed=seed) for seed in range(4)]
    harness.add(*requests)
    harness.run()
    stats = harness.scheduler.stats(0.0)
    assert stats.num_preemptions > 0, "the test is about preemption"
    assert stats.num_output_tokens == 4 * 30
    for request in requests:
        outputs = harness.outputs[request.request_id]
        assert harness.answer(request.request_id) == expected_answer(request, max_model_len=64)
        assert len(outputs) == 30, "one output per token, none for a preemption"
        assert [output.finish_reason for output in outputs[:-1]] == [None] * 29
        assert {output.num_prompt_tokens for output in outputs} == {20}
        assert {output.num_cached_tokens for output in outputs} == {0}


def test_a_preempted_request_says_so_and_what_it_waited_for() -> None:
    harness = tight()
    requests = [make_request(20, max_tokens=30) for _ in range(4)]
    harness.add(*requests)
    harness.run()
    timelines = [harness.last(request.request_id).timeline for request in requests]
    preempted = [timeline for timeline in timelines if timeline and timeline.num_preemptions]
    assert preempted
    assert all(timeline.waited_s.get(WaitReason.BLOCKS, 0.0) > 0.0 for timeline in preempted)
    for timeline in preempted:
        assert len(timeline.pauses) == timeline.num_preemptions
        pauses_s = sum(pause.resumed_s - pause.preempted_s for pause in timeline.pauses)
        # Besides, a request may have waited on its slot for a block.
        assert sum(timeline.waited_s.values()) >= timeline.prefill_started_s - timeline.received_s + pauses_s - 1e-9
    assert sum(t.num_preemptions for t in timelines if t) == harness.scheduler.stats(0.0).num_preemptions


def test_blocks_of_a_preempted_request_are_found_again() -> None:
    harness = make_harness()
    staying, leaving = make_request(30, max_tokens=20), make_request(30, max_tokens=20)
    harness.add(staying, leaving)
    while len(harness.outputs[leaving.request_id]) < 5:
        harness.step()
    assert harness.scheduler.preempt_one(harness.clock.now_s)
    batch = harness.step()
    assert batch is not None
    resumed = next(row for row in batch.rows if row.request_id == leaving.request_id)
    # 35 tokens, of which 34 were computed and 32 lie in full blocks.
    assert (resumed.start, resumed.num_tokens, resumed.output_index) == (32, 3, 5)
    harness.run()
    assert harness.answer(leaving.request_id) == expected_answer(leaving)


@PIPELINES
def test_a_token_in_flight_at_preemption_is_neither_lost_nor_sampled_again(steps_in_flight: int) -> None:
    harness = make_harness(make_config(max_steps_in_flight=steps_in_flight, prefix_cache="off"))
    staying, leaving = make_request(9, max_tokens=20), make_request(9, max_tokens=20)
    harness.add(staying, leaving)
    for _ in range(5):
        harness.step()
    assert harness.scheduler.preempt_one(harness.clock.now_s)
    harness.run()
    sampled = [
        (row.request_id, row.output_index) for batch in harness.runner.batches for row in batch.rows if row.samples
    ]
    assert len(sampled) == len(set(sampled)) == 40
    for request in (staying, leaving):
        assert harness.answer(request.request_id) == expected_answer(request)


@PIPELINES
def test_the_last_token_may_arrive_after_preemption(steps_in_flight: int) -> None:
    harness = make_harness(make_config(max_steps_in_flight=steps_in_flight))
    staying, leaving = make_request(9, max_tokens=30), make_request(9, max_tokens=6)
    harness.add(staying, leaving)
    while len(harness.outputs[leaving.request_id]) < 5:
        harness.step()
    harness.scheduler.preempt_one(harness.clock.now_s)
    harness.run()
    for request in (staying, leaving):
        assert harness.answer(request.request_id) == expected_answer(request)
        assert harness.last(request.request_id).finish_reason == "length"


def test_one_that_resumed_is_left_alone_for_a_while() -> None:
    harness = make_harness(make_config(num_blocks=256, max_model_len=512))
    one, other = make_request(8, max_tokens=300), make_request(8, max_tokens=300)
    harness.add(one, other)
    harness.step()
    # Equal progress: the lower slot goes. Then that one is immune, and later both are again as at the beginning.
    for num_steps, victim in ((1, one), (1, other), (IMMUNE_TOKENS + 1, one)):
        for _ in range(num_steps):
            harness.step()
        assert harness.scheduler.preempt_one(harness.clock.now_s)
        harness.step()
        assert harness.runner.released[-1] == victim.request_id


def test_the_last_runner_is_never_taken_off() -> None:
    harness = make_harness()
    harness.add(make_request(8))
    assert not harness.scheduler.preempt_one(0.0)
    harness.step()
    assert not harness.scheduler.preempt_one(harness.clock.now_s)


def test_a_pool_far_too_small_for_its_slots_still_answers_everybody() -> None:
    harness = tight(slots=8, num_blocks=16, max_waiting_requests=100)
    requests = [make_request(12, max_tokens=50) for _ in range(20)]
    harness.add(*requests)
    harness.run()
    for request in requests:
        assert harness.answer(request.request_id) == expected_answer(request, max_model_len=64)
    stats = harness.scheduler.stats(0.0)
    assert stats.num_preemptions > 10
    assert sum(batch.num_tokens for batch in harness.runner.batches) < 3 * sum(12 + 50 for _ in requests)


def test_a_high_watermark_prevents_preemption() -> None:
    harness = tight(admission_watermark_tokens=64)
    requests = [make_request(20, max_tokens=30) for _ in range(8)]
    harness.add(*requests)
    harness.run()
    assert harness.scheduler.stats(0.0).num_preemptions == 0
