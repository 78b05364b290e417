"""The office's mix on a virtual clock: what each class of users waits for the sake of the others.

Waits are arrival to start of reading. The orderings and ratios are those that an office notices; the figures come from
seeds, so they are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import pytest

from engine.request import WaitReason
from engine.scheduler import prefill_turn
from tests.office import Asked, Machine, Office, Person, agent, askers, office_config, percentile, readers

SEEDS = (1, 2)
NUM_ASKERS = 14


def run(people: Iterable[Person], seed: int, duration_s: float = 350.0, **changes: object) -> Office:
    office = Office(people, office_config(**changes), Machine(), seed).run(duration_s)
    office.scheduler.check_invariants()
    return office


@cache
def mix(seed: int) -> Office:
    return run([*askers(NUM_ASKERS), *readers(3)], seed)


@cache
def questions_alone(seed: int) -> Office:
    return run(askers(NUM_ASKERS), seed)


@cache
def documents_alone(seed: int) -> Office:
    return run(readers(3), seed)


@cache
def flooded(seed: int, at_once: int) -> Office:
    return run([*askers(8), agent(at_once)], seed, 200.0, slots=8)


def p95_wait_s(offices: Iterable[Office], kind: str) -> float:
    return percentile((asked.wait_s for office in offices for asked in office.of(kind)), 0.95)


def num_read(offices: Iterable[Office], kind: str) -> int:
    return sum(office.num_computed[kind] for office in offices)


def test_long_readers_do_not_keep_short_questions_waiting() -> None:
    alone_s = p95_wait_s(map(questions_alone, SEEDS), "short")
    mixed_s = p95_wait_s(map(mix, SEEDS), "short")
    assert mixed_s <= 2.0 * alone_s


def test_short_questions_do_not_slow_the_long_readers_by_much() -> None:
    assert num_read(map(mix, SEEDS), "long") >= 0.85 * num_read(map(documents_alone, SEEDS), "long")


def test_without_passing_short_questions_would_wait_for_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_turn, "MAX_TIMES_PASSED", 0)
    strict = run([*askers(NUM_ASKERS), *readers(3)], SEEDS[0], 120.0)
    assert p95_wait_s([strict], "short") > 10.0 * p95_wait_s([mix(SEEDS[0])], "short")


def test_streams_stall_no_longer_than_the_target() -> None:
    mixed = [s for seed in SEEDS for d, c, s in mix(seed).step_s if d and c]
    assert percentile(mixed, 0.5) == pytest.approx(0.12, rel=0.1)
    assert percentile(mixed, 0.95) < 1.15 * 0.12


def test_an_agent_that_floods_costs_others_no_more_than_an_equal_share_would() -> None:
    """Beside one other user half of the eight slots are the agent's share."""
    fair_s = p95_wait_s([flooded(seed, 4) for seed in SEEDS], "short")
    flooded_s = p95_wait_s([flooded(seed, 50) for seed in SEEDS], "short")
    assert flooded_s <= 2.0 * fair_s


def test_without_users_everybody_would_wait_behind_the_agent() -> None:
    office = Office([*askers(8), agent(50)], office_config(slots=8), Machine(), SEEDS[0])
    office.knows_users = False
    office.run(150.0)
    assert p95_wait_s([office], "short") > 100.0 * p95_wait_s([flooded(SEEDS[0], 50)], "short")


def test_the_agent_itself_gets_what_the_others_leave() -> None:
    fair, flood = (sum(len(flooded(seed, n).of("agent")) for seed in SEEDS) for n in (4, 50))
    assert flood >= 0.95 * fair
    agents_s = p95_wait_s([flooded(seed, 50) for seed in SEEDS], "agent")
    assert agents_s > 50.0 * p95_wait_s([flooded(seed, 50) for seed in SEEDS], "short")


def everybody() -> list[Asked]:
    return [asked for seed in SEEDS for o in (mix(seed), flooded(seed, 50)) for asked in o.finished]


def test_everybody_knows_what_they_waited_for() -> None:
    for asked in everybody():
        # A prompt that was passed while it was being read waited after its start, too.
        assert sum(asked.timeline.waited_s.values()) >= asked.wait_s - 1e-6
    in_flood = [a for seed in SEEDS for a in flooded(seed, 50).of("agent") if a.wait_s > 10.0]
    assert in_flood
    for asked in in_flood:
        assert max(asked.timeline.waited_s, key=lambda r: asked.timeline.waited_s[r]) is WaitReason.SLOTS


def test_the_predicted_wait_is_about_right() -> None:
    ratios = []
    office = Office([Person("p", "only", 1.6, (500, 4_000), (50, 200))], office_config(slots=8), Machine(), 3)
    office.watch_predictions = True
    for asked in office.run(300.0).finished:
        if asked.predicted_wait_s is not None and asked.wait_s > 1.0:
            ratios.append(asked.predicted_wait_s / asked.wait_s)
    assert len(ratios) > 60
    assert 0.7 < percentile(ratios, 0.5) < 1.3
    assert percentile(ratios, 0.1) > 0.5
    assert percentile(ratios, 0.9) < 2.0
