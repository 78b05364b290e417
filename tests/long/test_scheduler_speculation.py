"""Random walks as in test_scheduler_machine, over texts that can be guessed.

With every move around them, guesses change no answer and leave nothing behind.
"""

from __future__ import annotations

import random

import pytest

from engine.memory.window_blocks import WindowConfig, most_ahead_tokens, num_blocks_needed
from tests.builders import make_config, make_request
from tests.fakes import make_harness, repeating_token
from tests.long.test_scheduler_machine import Walk, random_request

MAX_MODEL_LEN = 40


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(("num_blocks", "slots", "window_tokens"), [(11, 4, None), (60, 8, None), (24, 4, 9)])
def test_guesses_change_no_answer(steps_in_flight: int, num_blocks: int, slots: int, window_tokens: int | None) -> None:
    window = None
    if window_tokens is not None:
        ahead = most_ahead_tokens(12, slots * 9, steps_in_flight)
        window = WindowConfig(window_tokens, num_blocks_needed(window_tokens, 4, slots, ahead))
    draw = random.Random(num_blocks * 10 + steps_in_flight)
    config = make_config(
        slots=slots,
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        max_chunk_tokens=12,
        max_waiting_requests=30,
        max_steps_in_flight=steps_in_flight,
        max_draft_tokens=8,
        window=window,
    )
    walk = Walk(make_harness(config, checks=False, choose=repeating_token))
    for _ in range(3000):
        chance = draw.random()
        if chance < 0.08:
            request = random_request(draw, walk)
            walk.add(make_request(request.prompt_token_ids, max_tokens=draw.randint(1, 30), seed=draw.randrange(5)))
        elif chance < 0.10 and (open_ids := walk.open_ids):
            walk.cancel(draw.choice(open_ids))
        elif chance < 0.12:
            walk.harness.scheduler.preempt_one(walk.harness.clock.now_s)
        elif chance < 0.125:
            walk.harness.scheduler.shrink_prefix_cache(draw.randint(0, 5))
        elif chance < 0.13 and (open_ids := walk.open_ids):
            walk.fail_next([draw.choice(open_ids)] if draw.random() < 0.7 else [])
        walk.step()
    walk.finish()
    stats = walk.harness.scheduler.stats(0.0)
    assert stats.num_preemptions > 5
    assert stats.num_accepted_tokens > 100
    assert stats.num_draft_tokens > stats.num_accepted_tokens
