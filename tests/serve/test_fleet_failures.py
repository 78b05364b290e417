"""A Mac that dies, a Mac that sleeps, the head that dies, and an update, each under load: nothing is lost.

Completed: the whole answer came. Moved: it came from another replica than the first. Cut: its replica was lost after
the first message, and the caller was told. Lost: no end within a minute.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.fleet_calls import WARM_UP_S
from tests.fleet_load import Load
from tests.fleet_nodes import ROOT, Fleet, Node
from tests.fleet_replicas import BLOCK_SIZE
from tests.serve_endpoint import eventually

REPLICA = "tests.fleet_replicas:FleetReplica"
MODEL = {"name": "chain", "replicas": 3, "engine": {"slots": 4, "block_size": BLOCK_SIZE}}
DEPLOYMENT = "MetalReplica-chain"
INGRESS = "ray::ServeReplica:metalslots:Ingress"
CALLS_PER_S = 4
MAX_TOKENS = 100


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """One for all tests: their order matters, since a node that is killed stays away until the head is back."""
    with Fleet(3) as nodes:
        deploy(nodes)
        yield nodes


def deploy(fleet: Fleet, **replica: Any) -> None:
    fleet.deploy(REPLICA, models=[MODEL], replica={"shutdown_grace_s": 5.0, **replica}, ingress={"replicas": 3})


def calls_during(fleet: Fleet, duration_s: int, happening: Callable[[], None]) -> dict[str, Any]:
    """Make calls for so long, let ``happening`` happen after some, and return what became of them."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.fleet_calls", fleet.address, DEPLOYMENT]
    arguments = [str(duration_s), str(CALLS_PER_S), str(MAX_TOKENS)]
    with subprocess.Popen(
        [*command, *arguments], env=fleet.environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "warm\n"
        happening()
        found: dict[str, Any] = json.loads(process.communicate(timeout=duration_s + 120)[0].splitlines()[-1])
    print(found)
    assert sum(found["outcomes"].values()) == found["calls"] == (WARM_UP_S + duration_s) * CALLS_PER_S
    return found


def test_an_update_takes_one_mac_at_a_time_and_no_answer_with_it(fleet: Fleet) -> None:
    before = {replica["replica_id"] for replica in fleet.replicas()}
    found = calls_during(fleet, 20, lambda: deploy(fleet, flush_interval_ms=25.0))
    assert found["outcomes"] == {"completed": found["calls"]}
    after = {replica["replica_id"] for replica in fleet.replicas()}
    assert len(after) == 3
    assert not before & after


def test_an_ingress_is_killed_and_no_engine_goes_on_for_it(fleet: Fleet) -> None:
    load = Load(fleet.url, limit_s=30.0, per_s=CALLS_PER_S)
    killed_s = 0.0

    def kill_one() -> None:
        nonlocal killed_s
        eventually(lambda: load.num_complete() >= 2 * CALLS_PER_S)
        killed_s = time.monotonic()
        (ingress,) = [process for process in fleet.nodes[1].processes if process.cmdline()[:1] == [INGRESS]]
        ingress.kill()
        eventually(lambda: load.num_complete(killed_s) >= 5 * CALLS_PER_S)

    asyncio.run(load.ask_during(kill_one, max_tokens=MAX_TOKENS))
    failed = [turn for turn in load.turns if not turn.is_complete]
    print(f"{len(load.turns)} requests, {len(failed)} failed: {[(turn.status, turn.error) for turn in failed]}")
    assert all(turn.ended_s - turn.sent_s < 20 for turn in load.turns)
    assert [turn.error for turn in failed if turn.sent_s > killed_s + 2] == []
    eventually(lambda: [replica["num_open_calls"] for replica in fleet.replicas()] == [0, 0, 0])


@pytest.mark.timeout(240)
def test_a_node_falls_asleep_and_wakes_up(fleet: Fleet) -> None:
    found = calls_during(fleet, 20, lambda: fleet.nodes[2].signal(signal.SIGSTOP))
    assert set(found["outcomes"]) <= {"completed", "cut: replica_lost"}
    assert found["outcomes"].get("cut: replica_lost", 0) <= 4
    assert found["longest_s"] < 30
    fleet.nodes[2].signal(signal.SIGCONT)
    eventually(lambda: len(fleet.replicas()) == 3)


def test_a_node_is_killed(fleet: Fleet) -> None:
    found = calls_during(fleet, 10, fleet.nodes[2].kill)
    assert set(found["outcomes"]) <= {"completed", "cut: replica_lost"}
    assert found["outcomes"].get("cut: replica_lost", 0) <= 4, "no more than its slots held"
    assert found["longest_s"] < 20


def has_ended(node: Node) -> bool:
    return node.has_ended


@pytest.mark.timeout(300)
def test_members_go_on_without_their_head_and_the_app_comes_back_with_it(fleet: Fleet) -> None:
    load = Load(fleet.url, limit_s=30.0, per_s=CALLS_PER_S)
    killed_s = restarted_s = back_s = 0.0

    def lose_the_head_and_get_it_back() -> None:
        nonlocal killed_s, restarted_s, back_s
        eventually(lambda: load.num_complete() >= 8)
        killed_s = time.monotonic()
        fleet.nodes[0].kill()
        eventually(lambda: load.num_complete(killed_s) >= 10 * CALLS_PER_S)
        restarted_s = time.monotonic()
        # What the daemons do: the head's starts Ray and deploys again, the members' start Ray again when it ends.
        fleet.start_node(0)
        for number in (1, 2):
            eventually(partial(has_ended, fleet.nodes[number]))
            fleet.start_node(number)
        fleet.wait_for_nodes(3)
        deploy(fleet)
        back_s = time.monotonic()
        eventually(lambda: load.num_complete(back_s) >= 8)

    asyncio.run(load.ask_during(lose_the_head_and_get_it_back, max_tokens=30))
    failed = [turn for turn in load.turns if not turn.is_complete]
    print(
        f"{len(load.turns)} requests, {len(failed)} failed, of them "
        f"{sum(killed_s - 3 < turn.sent_s < restarted_s for turn in failed)} while the head was gone; "
        f"all came back {back_s - restarted_s:.1f} s after the head"
    )
    assert all(turn.ended_s - turn.sent_s < 30 for turn in load.turns), "a request has hung"
    # What the head's own proxy and ingress had in their hands breaks off, visibly; members go on.
    assert [turn.error for turn in failed if killed_s + 2 < turn.sent_s < restarted_s - 3] == []
    assert [turn.error for turn in failed if turn.sent_s > back_s] == []
    assert len(fleet.replicas()) == 3
