"""``python -m serve_app.routing.simulation [office|fleet|mixed|speed]``: prints the tables of docs/routing.md."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

from serve_app.protocol import PrefixChain
from serve_app.routing.policy import RoutingPolicy, RoutingRequest
from serve_app.routing.report import ReplicaReport
from serve_app.routing.simulation.experiments import (
    OFFICE_CASES,
    FleetCase,
    all_rules,
    compare,
    machines_needed,
    mixed_fleet,
)
from serve_app.routing.simulation.rules import Policy, Sticky
from serve_app.routing.simulation.run import Outcome, run
from serve_app.routing.simulation.traffic import Traffic, requests

HEADER = "| rule | wait mean / p95 s | TTFT p95 s | E2E mean s | prompt cached | load max/mean | requests max/mean |"


def office(num_requests: int) -> None:
    """Macs needed by the policy and by the fixed sticky rule, on the office's loads."""
    print("| calls/h | long prompts | kept | policy: Macs (wait mean / p95) | sticky: Macs (wait mean / p95) |")
    print("|---|---|---|---|---|")
    for case in OFFICE_CASES:
        cells = []
        for rule in (Policy, lambda _num: Sticky()):
            num, outcome = machines_needed(case, rule, num_requests)
            cells.append(f"{num} ({outcome.wait_mean_s:.2f} / {outcome.wait_p95_s:.1f})")
        row = (f"{case.requests_per_hour:.0f}", f"{case.long_share:.0%}", str(case.num_kept), *cells)
        print(f"| {' | '.join(row)} |", flush=True)


def fleet(num_machines: int, num_requests: int, num_routers: int, names: Sequence[str]) -> None:
    """A large fleet under each rule."""
    print(f"{num_machines} Macs, {100 * num_machines} people, {num_requests} requests, {num_routers} routers")
    print(f"{HEADER}\n|---|---|---|---|---|---|---|")
    for name, outcome in compare(FleetCase(num_machines, num_requests), num_routers, names):
        print(_row(name, outcome), flush=True)


def mixed(num_requests: int) -> None:
    """Two fast and two slow Macs under each rule."""
    kinds = mixed_fleet()
    print(f"{HEADER}\n|---|---|---|---|---|---|---|")
    for name, rule in all_rules(len(kinds), len(kinds)).items():
        print(_row(name, run(rule, kinds, requests(Traffic(900, num_live=200), num_requests))), flush=True)


def speed(num_decisions: int = 3000) -> None:
    """CPU time of a decision, for a conversation of 40 links that one replica has and a head that all have."""
    draw = random.Random(1)
    names = tuple(draw.getrandbits(64) for _ in range(40))
    prefix = PrefixChain(names, tuple(range(500, 20_500, 500)), names[1], 20_500)
    print("| replicas | us per decision |\n|---|---|")
    for num in (3, 10, 100, 1000):
        policy = RoutingPolicy()
        for number in range(num):
            others = frozenset(draw.getrandbits(64) for _ in range(500))
            known = frozenset(names) if number == num // 2 else frozenset(names[:1])
            report = ReplicaReport(
                1, 4, draw.randrange(5), draw.randrange(3), 3000, 800.0, 5.0, prefixes=others | known
            )
            policy.report(str(number), str(number), report, 0.0)
        before_s = time.process_time()
        for index in range(num_decisions):
            decision = policy.choose(RoutingRequest(str(index), prefix, names[1]), 1.0)
            assert decision is not None
            policy.came_back(str(index), decision.chosen.replica)
        print(f"| {num} | {(time.process_time() - before_s) / num_decisions * 1e6:.0f} |", flush=True)


def _row(name: str, outcome: Outcome) -> str:
    cells = (
        name,
        f"{outcome.wait_mean_s:.2f} / {outcome.wait_p95_s:.2f}",
        f"{outcome.ttft_p95_s:.1f}",
        f"{outcome.e2e_mean_s:.1f}",
        f"{outcome.cached_share:.0%}",
        f"{outcome.load_ratio:.2f}",
        f"{outcome.served_ratio:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m serve_app.routing.simulation", description=__doc__)
    parser.add_argument("experiment", choices=["office", "fleet", "mixed", "speed"])
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--machines", type=int, default=1000)
    parser.add_argument("--routers", type=int, default=4)
    parser.add_argument("--rule", action="append", default=[], help="only this one (may be repeated)")
    options = parser.parse_args()
    match options.experiment:
        case "office":
            office(options.requests)
        case "fleet":
            fleet(options.machines, options.requests, options.routers, options.rule)
        case "mixed":
            mixed(options.requests)
        case _:
            speed()


if __name__ == "__main__":
    main()
