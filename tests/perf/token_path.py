"""What a token costs on its way, and how long it takes: engine, replica, ingress, proxy, client.

    python -m tests.perf.token_path [--messages-per-s 160] [--messages-per-s 1000000] [--seconds 8]

Sixteen streams of 50 tokens a second each over HTTP, through one real Ray node, from an engine without a model that
steps by the clock. CPU time of each process on the way is divided by the tokens that went through; the engine's own
(it has none but the scheduler's) and the client's are left out. Lag is from the end of the step that made a token to
its arrival here: of every token, and of the newest token of each message, which has not waited for a flush.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from serve_app.latency import percentile
from tests.fleet_nodes import Fleet
from tests.perf.stamped_engine import NUM_STREAMS, STEP_S

REPLICA = "tests.perf.stamped_engine:StampedReplica"
# Beginnings of command lines, and what the process does. Ray names its workers after their actors.
PARTS = {
    "ray::ProxyActor": "proxy",
    "ray::ServeReplica:metalslots:Ingress": "ingress",
    "ray::ServeReplica:metalslots:MetalReplica": "replica",
    "ray::ServeController": "controller",
}
SETTLE_S = 2.0
IDLE_S = 5.0


@dataclass
class Arrivals:
    """For each stream, how many tokens each message brought and when."""

    by_stream: dict[int, list[tuple[int, float]]] = field(default_factory=dict)

    async def read(self, session: aiohttp.ClientSession, url: str, number: int, num_tokens: int) -> None:
        """Ask and note what comes."""
        body = {
            "model": "chain",
            "messages": [{"role": "user", "content": f"stream {number}."}],
            "max_tokens": num_tokens,
            "stream": True,
        }
        messages = self.by_stream.setdefault(number, [])
        async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    delta = json.loads(line[6:])["choices"][0]["delta"]
                    if text := delta.get("content"):
                        messages.append((len(text), time.monotonic()))


def cpu_s(fleet: Fleet) -> dict[str, float]:
    """CPU seconds used so far by each part."""
    used = dict.fromkeys(PARTS.values(), 0.0)
    for process in fleet.nodes[0].processes:
        try:
            name = " ".join(process.cmdline())
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        part = next((part for beginning, part in PARTS.items() if name.startswith(beginning)), None)
        if part is not None:
            used[part] += times.user + times.system
    return used


async def run(fleet: Fleet, duration_s: float) -> tuple[Arrivals, dict[str, float], float, float]:
    """Returns arrivals, CPU seconds of each part, and the window in which they were used."""
    arrivals = Arrivals()
    num_tokens = int((duration_s + 2 * SETTLE_S) / STEP_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        for number in range(NUM_STREAMS):
            group.create_task(arrivals.read(session, fleet.url, number, num_tokens))
        await asyncio.sleep(SETTLE_S)
        began_s, before = time.monotonic(), cpu_s(fleet)
        await asyncio.sleep(duration_s)
        ended_s, after = time.monotonic(), cpu_s(fleet)
    return arrivals, {part: after[part] - before[part] for part in after}, began_s, ended_s


def lags_of(arrivals: Arrivals, stamps: Path, began_s: float, ended_s: float) -> tuple[list[float], list[float]]:
    """Seconds on the way within the window: of every token, and of the newest of each message."""
    every, newest = [], []
    for line in stamps.read_text().splitlines():
        prompt, made_s = json.loads(line)
        number = int(prompt.partition("stream ")[2].partition(".")[0])
        index = 0
        for num_tokens, arrived_s in arrivals.by_stream.get(number, ()):
            lags = [arrived_s - made for made in made_s[index : index + num_tokens]]
            index += num_tokens
            if began_s <= arrived_s < ended_s:
                every += lags
                newest.append(lags[-1])
    return sorted(every), sorted(newest)


def measure(fleet: Fleet, most_per_s: float, duration_s: float) -> None:
    """Deploy, measure and print one row."""
    stamps = fleet.folder / f"stamps-{most_per_s:g}"
    model = {"name": "chain", "engine": {"model": str(stamps), "slots": NUM_STREAMS}}
    fleet.deploy(REPLICA, models=[model], replica={"shutdown_grace_s": 0.0, "max_messages_per_s": most_per_s})
    before = cpu_s(fleet)
    threading.Event().wait(IDLE_S)
    idle = {part: (used - before[part]) / IDLE_S for part, used in cpu_s(fleet).items()}
    arrivals, used, began_s, ended_s = asyncio.run(run(fleet, duration_s))
    every, newest = lags_of(arrivals, stamps, began_s, ended_s)
    per_token = {part: 1e3 * used[part] / len(every) for part in ("proxy", "ingress", "replica")}
    _print_row(most_per_s, len(every), len(newest), per_token, idle, every, newest, ended_s - began_s)


def _print_row(
    most_per_s: float,
    num_tokens: int,
    num_messages: int,
    per_token_ms: Mapping[str, float],
    idle: Mapping[str, float],
    every: list[float],
    newest: list[float],
    duration_s: float,
) -> None:
    lags = [f"{1e3 * percentile(values, q):.1f}" for values in (newest, every) for q in (50, 99)]
    cells = [
        f"{most_per_s:g}",
        f"{num_tokens / duration_s:.0f}",
        f"{num_tokens / num_messages:.2f}",
        *(f"{per_token_ms[part]:.3f}" for part in ("proxy", "ingress", "replica")),
        f"{sum(per_token_ms.values()):.3f}",
        f"{lags[0]} / {lags[1]}",
        f"{lags[2]} / {lags[3]}",
        f"{100 * sum(idle.values()):.1f} %",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--messages-per-s", type=float, action="append", help="replica.max_messages_per_s (may be repeated)"
    )
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    print(
        "| messages/s at most | tokens/s | tokens per message | proxy | ingress | replica | CPU ms per token |", end=""
    )
    print(" lag of a message p50 / p99 ms | lag of a token p50 / p99 ms | all of it idle |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with Fleet(1) as fleet:
        for most_per_s in arguments.messages_per_s or [1e6, 160.0]:
            measure(fleet, most_per_s, arguments.seconds)


if __name__ == "__main__":
    main()
