"""What the scheduler says of its own speed and of the work ahead."""

from __future__ import annotations

from tests.builders import make_config, make_request
from tests.fakes import make_harness


def test_speeds_are_unknown_before_anything_ran_and_measured_afterwards() -> None:
    harness = make_harness(make_config(slots=2, num_blocks=256))
    before = harness.scheduler.stats(0.0)
    assert before.prefill_tokens_per_s is None
    assert before.usual_answer_s is None
    for _ in range(4):
        harness.add(make_request(64, max_tokens=16))
    harness.run()
    after = harness.scheduler.stats(harness.clock.now_s)
    assert after.prefill_tokens_per_s is not None
    assert after.prefill_tokens_per_s > 0
    assert after.usual_answer_s is not None
    assert after.usual_answer_s > 0
    assert after.usual_answer_row_s is not None
    assert after.usual_answer_row_s >= 0


def test_unread_tokens_are_those_of_all_prompts_and_are_gone_when_they_are_read() -> None:
    harness = make_harness(make_config(slots=1, num_blocks=256))
    harness.add(make_request(40, max_tokens=4), make_request(24, max_tokens=4))
    assert harness.scheduler.stats(0.0).num_unread_tokens == 64
    harness.step()
    waiting = harness.scheduler.stats(harness.clock.now_s)
    assert waiting.num_waiting_tokens == 24
    assert 24 <= waiting.num_unread_tokens < 64
    harness.run()
    assert harness.scheduler.stats(harness.clock.now_s).num_unread_tokens == 0
