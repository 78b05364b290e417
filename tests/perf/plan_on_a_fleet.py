"""``python -m tests.perf.plan_on_a_fleet [--rates 0.3,0.6,0.9] [--sessions 64]``: the planner's prediction, measured.

Two Ray nodes on this machine, each with one replica of the demo model: profiles one of them, puts open loops on both,
and sets what `metalslots plan check` predicts for the same sessions beside what was measured. Guesses are off: the plan
knows none, and a small model that may not end repeats itself. Needs a quiet machine: the two replicas, the proxy and
the bench share its cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from serve_app.bench.document import RunDocument, read_document
from tests.fleet_nodes import Fleet
from tests.serve_endpoint import eventually

REPLICA = "serve_app.replica.deployment:MetalReplica"
SLOTS = 4
LIMIT_S = 900.0
OUT = Path("bench-results/plan-on-a-fleet").absolute()


def deploy(fleet: Fleet, num_replicas: int) -> None:
    """Deploy the demo model on so many nodes and wait until all of them answer."""
    engine = {"model": "demo", "slots": SLOTS, "speculation": "off"}
    model = {"name": "demo", "replicas": num_replicas, "engine": engine}
    fleet.deploy(REPLICA, models=[model])
    eventually(lambda: len(fleet.replicas()) == num_replicas)


def command(fleet: Fleet, *arguments: str) -> str:
    """Run `metalslots` and return what it prints."""
    done = fleet.command(*arguments, limit_s=LIMIT_S)
    print(done.stderr, file=sys.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def token_times_ms(document: RunDocument) -> dict[str, float]:
    """Median time per output token of the calls that had the fleet to themselves, and of those beside others."""
    timings = [call.timing for run in document.runs for call in run.result.calls if call.timing is not None]
    found: dict[str, list[float]] = {"alone": [], "beside others": []}
    for timing in timings:
        others = (other for other in timings if other is not timing)
        is_beside = any(
            other.sent_s < timing.sent_s + timing.e2e_s and timing.sent_s < other.sent_s + other.e2e_s
            for other in others
        )
        if timing.tpot_s is not None:
            found["beside others" if is_beside else "alone"].append(timing.tpot_s * 1e3)
    return {name: round(median(each_ms), 1) for name, each_ms in found.items() if each_ms}


def measure(fleet: Fleet, profile: Path, rate: str, sessions: int, workload: str) -> dict[str, Any]:
    """Put one load on the fleet; returns prediction and measurement of it."""
    out = OUT / f"rate-{rate}-{time.strftime('%H%M%S')}"
    load = ["--workload", workload, "--rate", rate, "--sessions", str(sessions), "--tokenizer", "demo"]
    command(fleet, "bench", "run", "--url", fleet.url, *load, "--check-answers", "0", "--out", str(out))
    (recorded,) = out.glob("*.json")
    checked = command(
        fleet, "plan", "check", str(recorded), "--profile", str(profile), "--macs", "2", "--slots", str(SLOTS), "--json"
    )
    return {"figures": json.loads(checked), "token_ms": token_times_ms(read_document(recorded))}


def main() -> None:
    """Do it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="0.3,0.6,0.9")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--workload", default="demo-mixed")
    parser.add_argument("--profile", type=Path, help="made before; otherwise it is made here")
    options = parser.parse_args()
    with Fleet(2) as fleet:
        profile = options.profile
        if profile is None:
            deploy(fleet, 1)
            out = OUT / "profile"
            command(fleet, "bench", "profile", "--url", fleet.url, "--tokenizer", "demo", "--out", str(out))
            profile = max(out.glob("*.json"))
        deploy(fleet, 2)
        for rate in options.rates.split(","):
            compared = measure(fleet, profile, rate, options.sessions, options.workload)
            print(json.dumps({"rate": rate, **compared}), flush=True)


if __name__ == "__main__":
    main()
