"""``python -m tests.perf.head_restart [--keep-state]``: what the loss of the head costs, with four requests a second.

Three Ray nodes on this machine; the head is killed, and started again after ten seconds. As the daemons do, members
whose Ray has ended are started again, and the app is deployed again where nothing was kept.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from tests.fleet_load import Load
from tests.fleet_nodes import Fleet
from tests.fleet_replicas import BLOCK_SIZE
from tests.serve_endpoint import eventually

REPLICA = "tests.fleet_replicas:FleetReplica"
NUM_NODES = 3
MODEL = {"name": "chain", "replicas": NUM_NODES, "engine": {"slots": 4, "block_size": BLOCK_SIZE}}
CALLS_PER_S = 4
ABSENCE_S = 10
MAX_TOKENS = 30


def deploy(fleet: Fleet) -> None:
    """Deploy the app, or update it."""
    replica = {"shutdown_grace_s": 5.0}
    fleet.deploy(REPLICA, models=[MODEL], replica=replica, ingress={"replicas": NUM_NODES})


def lose_the_head(fleet: Fleet, load: Load, keeps_state: bool) -> tuple[float, float]:
    """Kill it, start it again, and wait until everybody answers; returns when it was started and when all were back."""
    eventually(lambda: load.num_complete() >= 2 * CALLS_PER_S)
    killed_s = time.monotonic()
    fleet.nodes[0].kill()
    eventually(lambda: load.num_complete(killed_s) >= ABSENCE_S * CALLS_PER_S)
    started_s = time.monotonic()
    fleet.start_node(0)
    if not keeps_state:
        for number in range(1, NUM_NODES):
            eventually(lambda number=number: fleet.nodes[number].has_ended)  # type: ignore[misc]
            fleet.start_node(number)
        fleet.wait_for_nodes(NUM_NODES)
        deploy(fleet)
    eventually(lambda: len(fleet.replicas()) == NUM_NODES)
    back_s = time.monotonic()
    eventually(lambda: load.num_complete(back_s) >= 2 * CALLS_PER_S)
    return started_s, back_s


def main(keeps_state: bool) -> None:
    """Measure, and print one line."""
    fleet = Fleet(NUM_NODES)
    if keeps_state:
        fleet.environment |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(fleet.folder / "state")}
    with fleet:
        deploy(fleet)
        load = Load(fleet.url, limit_s=30.0, per_s=CALLS_PER_S)
        found: list[tuple[float, float]] = []
        happening = lambda: found.append(lose_the_head(fleet, load, keeps_state))  # noqa: E731
        asyncio.run(load.ask_during(happening, max_tokens=MAX_TOKENS))
    ((started_s, back_s),) = found
    failed = [turn for turn in load.turns if not turn.is_complete]
    print(f"{len(load.turns)} requests, {len(failed)} failed; all were back {back_s - started_s:.0f} s after the head")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep-state", action="store_true")
    main(parser.parse_args().keep_state)
