"""A part of what `python -m tests.mlx.strict_demo` does: strict answers of a real model, among plain ones."""

from __future__ import annotations

from tests.mlx.strict_demo import demo_client, strict_among_plain

NUM_REQUESTS = 12


async def test_strict_answers_are_valid_and_leave_the_plain_ones_as_they_are() -> None:
    async with demo_client(parity="off") as client:
        outcome = await strict_among_plain(client, range(NUM_REQUESTS))
    assert outcome.wrong == []
    assert outcome.num_strict == NUM_REQUESTS
    assert outcome.num_plain > 0
