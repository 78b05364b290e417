"""Measures the bench's own client: how late does it stamp what a server with known timing wrote?

Owns: a load of so many events a second from a child process, and the delays found. Must not know: real endpoints.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

from serve_app.bench.client import StreamClient, StreamRecord, read_lines
from serve_app.bench.errors import BenchError
from serve_app.latency import Summary, summarize

TOKEN_GAP_S = 0.025
FIRST_TOKEN_S = 0.05
# Beyond these the client's own delays would show in a table of milliseconds.
MAX_P99_DELAY_S = 0.005
MIN_SHARE_OF_EVENTS = 0.95


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """``delays_s``: event written by the server to stamped by the client. ``gaps_written_s``/``gaps_stamped_s``: the
    time between a stream's events as server and client have it. ``client_cores``: CPU the client used, in cores."""

    num_streams: int
    num_events: int
    events_per_s: float
    delays_s: Summary
    gaps_written_s: Summary
    gaps_stamped_s: Summary
    client_cores: float
    passed: bool


async def check_client(events_per_s: float, duration_s: float) -> SelfCheck:
    """Stream ``events_per_s`` for ``duration_s`` from a child and compare both sides' times."""
    num_streams = max(1, round(events_per_s * TOKEN_GAP_S))
    num_tokens = max(2, round(duration_s / TOKEN_GAP_S))
    body = json.dumps({"prompt": "x", "max_tokens": num_tokens}).encode()
    records = [StreamRecord() for _ in range(num_streams)]
    async with _server(num_streams) as url, StreamClient(f"{url}/v1/completions") as client:
        started_s, cpu_s = time.monotonic(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for number, record in enumerate(records):
                group.create_task(_one(client, body, record, TOKEN_GAP_S * number / num_streams))
        wall_s, cpu_s = time.monotonic() - started_s, time.process_time() - cpu_s
    return _judge(records, wall_s, cpu_s, num_streams * num_tokens)


async def _one(client: StreamClient, body: bytes, record: StreamRecord, after_s: float) -> None:
    # Spread over one gap: real streams are not in step with one another.
    await asyncio.sleep(after_s)
    await client.stream(body, record)


@asynccontextmanager
async def _server(num_slots: int) -> AsyncIterator[str]:
    options = ("--slots", str(num_slots), "--token-gap-ms", str(TOKEN_GAP_S * 1000))
    module = ("-m", "serve_app.bench.reference_server", "--first-token-ms", str(FIRST_TOKEN_S * 1000))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *module, *options, stdout=asyncio.subprocess.PIPE, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        if not address:
            raise BenchError("The server with known timing did not start.", "run it by hand to see why")
        yield address
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _judge(records: Sequence[StreamRecord], wall_s: float, cpu_s: float, num_planned: int) -> SelfCheck:
    streams = [list(_events(record)) for record in records]
    delays_s = summarize(stamped - written for stream in streams for written, stamped in stream)
    written_s = summarize(b[0] - a[0] for stream in streams for a, b in pairwise(stream))
    stamped_s = summarize(b[1] - a[1] for stream in streams for a, b in pairwise(stream))
    if delays_s is None or written_s is None or stamped_s is None:
        raise BenchError("The server with known timing sent nothing.", "run it by hand to see why")
    complete = delays_s.num >= MIN_SHARE_OF_EVENTS * num_planned
    return SelfCheck(
        num_streams=len(records),
        num_events=delays_s.num,
        events_per_s=delays_s.num / wall_s,
        delays_s=delays_s,
        gaps_written_s=written_s,
        gaps_stamped_s=stamped_s,
        client_cores=cpu_s / wall_s,
        passed=complete and delays_s.p99 <= MAX_P99_DELAY_S,
    )


def _events(record: StreamRecord) -> Iterator[tuple[float, float]]:
    """Time written and time stamped of each token."""
    for stamped_s, line in read_lines(record.pieces):
        if line.startswith(b"data: {"):
            event = json.loads(line[len(b"data: ") :])
            if "sent_s" in event:
                yield float(event["sent_s"]), stamped_s
