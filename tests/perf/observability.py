"""What watching costs: throughput of 16 streams of the demo model with everything on, over everything off.

``python -m tests.perf.observability``: one engine process, one HTTP server, and rounds that take turns. "On" is a span
for everything, sent to a collector in a process of its own; metrics, scraped every second; a JSON line for every call;
and two open dashboards. "Off" is none of that, not even the records. Each pair of neighbouring rounds gives a ratio;
the result is their median.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import uvicorn

from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from engine.model_source import resolve_model
from engine.text.tokenizer import load_tokenizer
from serve_app.ingress.fleet import ServedModel
from serve_app.ingress.http_app import HttpSettings, build_http_app
from serve_app.ingress.observing import IngressWatch
from serve_app.protocol import Deltas, GenerateCall, ReplicaStatus
from serve_app.replica.calls import CallRunner
from serve_app.telemetry.logs import LogConfig, configure_logs
from serve_app.telemetry.observer import ReplicaFamilies, ReplicaObserver, ReplicaView
from serve_app.telemetry.record import ReplicaName
from serve_app.telemetry.tracing import tracing_from_environment
from tests.fleet_nodes import free_port
from tests.serve_fakes import UnobservedFleet

NUM_STREAMS = 16
MAX_OVERHEAD = 0.02
COLLECTOR = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import sys
class Sink(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Sink).serve_forever()
"""


class _Nobody:
    """Stands where the recorder does, and records nothing."""

    def open(self, call: GenerateCall) -> _Nothing:
        return _Nothing(call)


class _Nothing:
    def __init__(self, call: GenerateCall) -> None:
        self.call = call
        self.received_s = time.monotonic()

    def prepared(self, request_ids: Sequence[str]) -> None:
        pass

    def note(self, arrived: object) -> None:
        pass

    def close(self, error: BaseException | None) -> None:
        pass


class OneMac(UnobservedFleet):
    """The demo model in an engine process. ``watched`` False: nothing is recorded."""

    models = (ServedModel("demo", 0),)

    def __init__(self, engine: AsyncEngine, runner: CallRunner, observer: ReplicaObserver) -> None:
        self._engine, self._runner, self._observer = engine, runner, observer
        self._recorder = runner._recorder

    def watch(self, watched: bool) -> None:
        """Record from now on, or no more."""
        self._runner._recorder = self._recorder if watched else _Nobody()  # type: ignore[assignment]
        self._engine.on_account = self._recorder.account if watched else None

    def open(self, call: GenerateCall) -> AbstractAsyncContextManager[AsyncIterator[Deltas]]:
        return aclosing(self._runner.generate(call))

    async def statuses(self) -> Sequence[ReplicaStatus]:
        return [ReplicaStatus("r", "n", "mac", "demo", True, self._runner.num_open, self._engine.status())]

    async def views(self) -> Sequence[ReplicaView]:
        return [self._observer.view(status) for status in await self.statuses()]

    async def families(self) -> Sequence[ReplicaFamilies]:
        return [self._observer.families(status) for status in await self.statuses()]


@contextmanager
def collector() -> Iterator[None]:
    """Somebody who takes spans, in a process of its own."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", COLLECTOR, str(port)])
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{port}"
    try:
        yield
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def served(fleet: OneMac, watch: IngressWatch) -> AsyncIterator[str]:
    """The real application on a port."""
    app = build_http_app(fleet, HttpSettings(2**20, 600.0, 10.0), None, watch)
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        await serving


async def stream(session: aiohttp.ClientSession, url: str, number: int, num_tokens: int) -> None:
    """Read one answer of ``num_tokens`` to its end."""
    body: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": f"Count on from {number}."}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        async for _ in reply.content.iter_any():
            pass


async def watchers(session: aiohttp.ClientSession, url: str) -> None:
    """Two people with the dashboard open, and Prometheus."""

    async def person() -> None:
        while True:
            async with session.get(f"{url}/dashboard/events") as reply:
                async for _ in reply.content.iter_any():
                    pass

    async def prometheus() -> None:
        while True:
            async with session.get(f"{url}/metrics") as reply:
                await reply.read()
            await asyncio.sleep(1)

    await asyncio.gather(person(), person(), prometheus())


async def one_round(session: aiohttp.ClientSession, url: str, num_tokens: int) -> float:
    """Tokens per second of all streams together."""
    start_s = time.perf_counter()
    await asyncio.gather(*(stream(session, url, number, num_tokens) for number in range(NUM_STREAMS)))
    return NUM_STREAMS * num_tokens / (time.perf_counter() - start_s)


async def measure(num_pairs: int, num_tokens: int) -> list[tuple[float, float]]:
    """Rounds in turns; returns pairs of (off, on) in tokens per second. The first of a pair alternates, too."""
    config = EngineConfig(model="demo", slots=NUM_STREAMS, max_model_len=512)
    tokenizer = load_tokenizer(resolve_model("demo"))
    engine = AsyncEngine.in_process(config, tokenizer)
    logs = LogConfig(format="json", folder=tempfile.mkdtemp(prefix="logs-"))
    configure_logs(logs, "replica")
    tracing = tracing_from_environment()
    assert tracing is not None
    observer = ReplicaObserver(ReplicaName("r", "n", "mac"), logs, 512, tracing)
    recorder = observer.recorder(engine.holds)
    runner = CallRunner(engine, tokenizer, flush_interval_s=0.03, max_waiting_requests=64, recorder=recorder)
    fleet = OneMac(engine, runner, observer)
    await engine.start()
    connector = aiohttp.TCPConnector(limit=0)
    pairs = []
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        served(fleet, IngressWatch()) as plain,
        served(fleet, IngressWatch(tracing.tracer)) as watched,
    ):
        await one_round(session, plain, 8)
        for number in range(num_pairs):
            rates = {}
            for on in (number % 2 == 1, number % 2 == 0):
                fleet.watch(on)
                looking = asyncio.create_task(watchers(session, watched)) if on else None
                rates[on] = await one_round(session, watched if on else plain, num_tokens)
                if looking is not None:
                    looking.cancel()
                    await asyncio.gather(looking, return_exceptions=True)
            pairs.append((rates[False], rates[True]))
            print(f"off {rates[False]:6.2f}  on {rates[True]:6.2f} tok/s  {rates[True] / rates[False]:.4f}", flush=True)
    await engine.close()
    runner.close()
    await asyncio.to_thread(observer.close)
    return pairs


def main() -> int:
    """Measure, tell, and fail when watching costs more than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40, help="of each answer")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        stack.enter_context(collector())
        pairs = asyncio.run(measure(options.pairs, options.tokens))
    ratios = sorted(on / off for off, on in pairs)
    median = statistics.median(ratios)
    print(f"on / off at {NUM_STREAMS} streams: median {median:.4f}, {ratios[0]:.4f} to {ratios[-1]:.4f}")
    return 0 if median >= 1 - MAX_OVERHEAD else 1


if __name__ == "__main__":
    sys.exit(main())
