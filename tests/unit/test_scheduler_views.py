"""What a scheduler shows of its requests while they are there, and what it tells of one that is ended."""

from __future__ import annotations

import pytest

from engine.request import FinishReason, WaitReason
from tests.builders import make_config, make_request
from tests.fakes import make_harness


def test_views_say_who_has_which_slot_and_who_waits_for_what() -> None:
    harness = make_harness(make_config(slots=1, max_chunk_tokens=16))
    reading, waiting = make_request(40, user="anna"), make_request(10, user="ben")
    harness.add(reading, waiting)
    harness.launch()
    (running,), (queued,) = harness.scheduler.views(harness.clock.now_s + 2.0)
    assert (running.slot, running.request_id, running.user) == (0, reading.request_id, "anna")
    assert (running.num_prompt_tokens, running.num_computed_tokens, running.num_output_tokens) == (40, 16, 0)
    assert (queued.request_id, queued.user, queued.num_tokens) == (waiting.request_id, "ben", 10)
    assert queued.waits_for == WaitReason.SLOTS
    assert queued.age_s == pytest.approx(2.0)


@pytest.mark.parametrize("how", ["cancel", "complete"])
def test_who_is_ended_gets_an_account_and_counts_as_what_it_was(how: str) -> None:
    harness = make_harness(make_config(slots=1))
    request, waiting = make_request(10, max_tokens=50), make_request(10)
    harness.add(request, waiting)
    for _ in range(4):
        harness.step()
    end = getattr(harness.scheduler, how)
    output, unseen = end(request.request_id, harness.clock.now_s), end(waiting.request_id, harness.clock.now_s)
    assert end(request.request_id, harness.clock.now_s) is None
    assert output.finish_reason is (FinishReason.STOP if how == "complete" else FinishReason.CANCELLED)
    assert (output.token_ids, output.timeline.slot, output.timeline.finished_s) == ((), 0, harness.clock.now_s)
    assert sum(unseen.timeline.waited_s.values()) == pytest.approx(harness.clock.now_s - waiting.received_s)
    assert (unseen.timeline.slot, unseen.timeline.admitted_s) == (None, None)
    stats = harness.scheduler.stats(harness.clock.now_s)
    assert (stats.num_finished, stats.num_cancelled) == ((2, 0) if how == "complete" else (0, 2))
    harness.scheduler.check_invariants()
