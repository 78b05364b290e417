"""The number of replicas follows the work: up in seconds, down once, nobody refused; a Mac that joins is used."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator

import pytest

from tests.fleet_load import Load
from tests.fleet_nodes import Fleet
from tests.fleet_replicas import BLOCK_SIZE
from tests.serve_endpoint import eventually

REPLICA = "tests.fleet_replicas:FleetReplica"
MODEL = {
    "name": "chain",
    # However long a replica takes to start on this machine, what waits for it has its place.
    "engine": {"slots": 4, "block_size": BLOCK_SIZE, "max_waiting_requests": 2000},
    "scaling": {"min_replicas": 1, "max_replicas": 3, "up_after_s": 1.0, "down_after_s": 5.0},
}
# An answer takes a second: one and a half slots of four are busy, and later nine.
MAX_TOKENS = 200
QUIET_PER_S = 1.5
DECISION = re.compile(r"scaling MetalReplica-chain: (\d) -> (\d): (.*)")


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet(2) as nodes:
        nodes.deploy(REPLICA, models=[MODEL], replica={"shutdown_grace_s": 5.0}, ingress={"replicas": 2})
        yield nodes


def decisions(fleet: Fleet) -> list[tuple[int, int, str]]:
    """From how many to how many, and why: what stands in the log of Serve's controller."""
    logs = sorted((fleet.folder / "session_latest" / "logs" / "serve").glob("controller_*.log"))
    lines = [line for log in logs for line in log.read_text().splitlines()]
    found = [match for line in lines if (match := DECISION.search(line))]
    return [(int(match[1]), int(match[2]), match[3]) for match in found]


@pytest.mark.timeout(240)
def test_a_step_of_load_is_followed_up_and_down_and_a_mac_that_joins_is_used(fleet: Fleet) -> None:
    load = Load(fleet.url, limit_s=180.0, per_s=QUIET_PER_S)
    joined_s = used_s = 0.0

    def rise_and_fall() -> None:
        nonlocal joined_s, used_s
        eventually(lambda: load.num_complete() >= 6)
        assert len(fleet.replicas()) == 1
        load.per_s = 6 * QUIET_PER_S
        # Three are wanted, and there are two Macs.
        eventually(lambda: len(fleet.replicas()) == 2)
        fleet.start_node()
        joined_s = time.monotonic()
        eventually(lambda: len(fleet.replicas()) == 3)
        used_s = time.monotonic()
        eventually(lambda: load.num_complete(used_s) >= 30)
        load.per_s = 0.0
        eventually(lambda: len(fleet.replicas()) == 1)

    asyncio.run(load.ask_during(rise_and_fall, max_tokens=MAX_TOKENS))
    log = decisions(fleet)
    print(f"{len(load.turns)} requests; the Mac that joined answered after {used_s - joined_s:.1f} s", *log, sep="\n")
    assert [turn.error for turn in load.turns if not turn.is_complete] == []
    numbers = [1, *(after for _, after, _ in log)]
    top = numbers.index(3)
    assert numbers[: top + 1] == sorted(set(numbers[: top + 1])), "up and down and up again"
    assert numbers[top:] == sorted(set(numbers[top:]), reverse=True), "down and up and down again"
    assert numbers[-1] == 1
    assert all(re.search(r"running \+ .* waiting", why) for _, _, why in log)
