"""Three Macs as one endpoint: where conversations go, against another router in the same run, and draining."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fleet_load import Load, Talk, Turn, hold, num_computed, share_that_returned
from tests.fleet_nodes import Fleet
from tests.fleet_replicas import BLOCK_SIZE, NUM_MACS, deploy
from tests.serve_endpoint import eventually, eventually_async

TALK = Talk(num_talks=12, num_turns=3)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(NUM_MACS) as nodes:
        deploy(nodes, "cost")
        yield nodes


def test_every_node_has_exactly_one_replica(fleet: Fleet) -> None:
    assert len({replica["node_id"] for replica in fleet.replicas()}) == len(fleet.replicas()) == 3


def test_conversations_return_to_their_cache_and_another_router_reads_more(fleet: Fleet) -> None:
    ours = hold(fleet.url, TALK)
    deploy(fleet, "round-robin")
    theirs = hold(fleet.url, TALK)
    deploy(fleet, "cost")
    # On a slow machine leaving is right more often, so this asks for less than tests.perf.routing_on_a_fleet measures.
    assert share_that_returned(ours, BLOCK_SIZE) >= 0.75
    assert num_computed(theirs) >= 1.3 * num_computed(ours)


def test_a_decision_comes_with_every_answer_and_stands_in_the_status(fleet: Fleet) -> None:
    (turn,) = hold(fleet.url, Talk(num_talks=1, num_turns=1, seed=77))
    assert re.match(r"(cold|cached|moved); replica=", turn.route)
    replicas = {replica["replica_id"] for replica in fleet.replicas()}
    assert any(turn.replica in replica for replica in replicas)

    def shown() -> bool:
        # Each node's ingress knows what it chose itself.
        decisions = httpx.get(f"{fleet.url}/status", timeout=10).json()["decisions"]
        return any(d["chosen"]["replica"] == turn.replica and len(d["alternatives"]) == 2 for d in decisions)

    eventually(shown)


def test_a_conversation_leaves_when_waiting_would_cost_more(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    # One ingress, so that one router sees all; and engines that stand still while the gate is shut.
    deploy(fleet, "cost", model=str(gate), num_ingresses=1)

    def num_open() -> int:
        return sum(replica["num_open_calls"] for replica in fleet.replicas())

    async def talk() -> tuple[Turn, Turn, list[Turn]]:
        load = Load(fleet.url)
        async with httpx.AsyncClient(timeout=60) as client:
            # A usual answer takes several times as long as reading the prompt: a wait for a slot costs more than that.
            messages = _question(0)
            await load.ask(client, messages, 0, 0, max_tokens=1000)
            first = await load.ask(client, messages, 0, 0, max_tokens=2)
            gate.touch()
            # The same from many at once: it is cached on one Mac, which has four slots.
            asking = [asyncio.create_task(load.ask(client, messages, 1, n, max_tokens=2)) for n in range(11)]
            await eventually_async(lambda: num_open() == 11)
            messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and then?"}]
            asking.append(asyncio.create_task(load.ask(client, messages, 0, 1, max_tokens=2)))
            await eventually_async(lambda: num_open() == 12)
            gate.unlink()
            *crowd, second = await asyncio.gather(*asking)
        return first, second, crowd

    first, second, crowd = asyncio.run(talk())
    deploy(fleet, "cost")
    assert [turn.error for turn in (first, second, *crowd) if not turn.is_complete] == []
    # How evenly it spreads depends on when reports come here; test_routing_crowd.py holds the policy to 3, 4 and 4.
    assert len(Counter(turn.replica for turn in crowd)) > 1, "the crowd piled up"
    assert second.replica != first.replica


def test_a_draining_mac_gets_nothing_new_and_finishes_what_it_has(fleet: Fleet) -> None:
    async def run() -> list[Turn]:
        load = Load(fleet.url)
        async with httpx.AsyncClient(timeout=60) as client:
            running = [
                asyncio.create_task(load.ask(client, _question(number), number, 0, max_tokens=300))
                for number in range(3)
            ]
            await asyncio.sleep(0.5)
            done = await asyncio.to_thread(fleet.command, "drain", fleet.nodes[1].address, "--address", fleet.address)
            assert done.returncode == 0, done.stderr
            for number in range(12):
                await load.ask(client, _question(100 + number), number, 1, max_tokens=2)
            await asyncio.gather(*running)
        return load.turns

    turns = asyncio.run(run())
    assert [turn.error for turn in turns if not turn.is_complete] == []
    (drained,) = [replica["replica_id"] for replica in fleet.replicas() if replica["draining"]]
    late = [turn for turn in turns if turn.number == 1]
    assert not [turn for turn in late if turn.replica in drained]
    done = fleet.command("undrain", fleet.nodes[1].address, "--address", fleet.address)
    assert done.returncode == 0, done.stderr
    assert not [replica for replica in fleet.replicas() if replica["draining"]]


def test_a_node_that_does_not_exist_is_refused_with_those_that_do(fleet: Fleet) -> None:
    done = fleet.command("drain", "mac-of-nobody", "--address", fleet.address)
    assert done.returncode == 1
    assert fleet.nodes[2].address in done.stderr


@pytest.mark.parametrize("stream", [True, False])
def test_two_hundred_early_disconnects_leave_nothing_running_on_any_mac(fleet: Fleet, stream: bool) -> None:
    draw = random.Random(11)

    def figures(name: str) -> list[int]:
        return [replica["engine"]["scheduler"][name] for replica in fleet.replicas()]

    async def leave_early(client: httpx.AsyncClient, number: int) -> None:
        body = {"model": "chain", "messages": _question(number), "max_tokens": 2000, "stream": stream}
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(draw.uniform(0, 0.1)),
                client.stream("POST", f"{fleet.url}/v1/chat/completions", json=body) as reply,
            ):
                async for _ in reply.aiter_bytes():
                    pass

    async def all_of_them() -> None:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_keepalive_connections=0)) as client:
            for _ in range(10):
                await asyncio.gather(*(leave_early(client, draw.randrange(10**6)) for _ in range(20)))

    before = figures("num_finished"), figures("num_cancelled")
    asyncio.run(all_of_them())
    eventually(lambda: [replica["num_open_calls"] for replica in fleet.replicas()] == [0, 0, 0])
    eventually(lambda: figures("num_running") == figures("num_waiting") == [0, 0, 0])
    assert sum(figures("num_finished")) == sum(before[0]), "an answer that nobody reads ran to its end"
    assert sum(figures("num_cancelled")) > sum(before[1]), "no request got as far as an engine"


def _question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"question {number} " * 20}]
