"""``python -m tests.perf.routing_on_a_fleet``: three routers under the same conversations on three nodes, in one run.

The replicas are those of ``tests.fleet_replicas``: 4 ms for a step, 0.4 ms for a token read. 24 conversations of four
turns begin by the clock. Needs a quiet machine: the time to the first token is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.latency import percentile
from tests.fleet_load import Talk, Turn, hold, num_computed, share_that_returned
from tests.fleet_nodes import Fleet
from tests.fleet_replicas import BLOCK_SIZE, NUM_MACS, deploy

ROUTERS = ("cost", "round-robin", "power-of-two")


def measure(fleet: Fleet, router: str) -> list[Turn]:
    """Deploy with this router and hold the conversations; returns their turns."""
    deploy(fleet, router)
    return hold(fleet.url, Talk())


def row(router: str, turns: Sequence[Turn], least: int) -> str:
    """A row of the table in docs/routing.md. ``least``: prompt tokens that the first router computed."""
    ttft_s = percentile(sorted(turn.ttft_s for turn in turns if turn.ttft_s is not None), 95)
    computed = num_computed(turns)
    returned = share_that_returned(turns, BLOCK_SIZE)
    return f"| {router} | {returned:.0%} | {computed:,} ({computed / least:.1f} x) | {ttft_s:.2f} s |"


def main() -> None:
    """Measure and print."""
    with Fleet(NUM_MACS) as fleet:
        seen = {router: measure(fleet, router) for router in ROUTERS}
    least = num_computed(seen[ROUTERS[0]])
    print("| router | turns that found all of the turn before cached | prompt tokens computed | TTFT p95 |")
    print("|---|---|---|---|")
    for router, turns in seen.items():
        print(row(router, turns, least))


if __name__ == "__main__":
    main()
