"""Three Macs in one process, busy, behind the real HTTP application: what the dashboard's tests look at.

``python -m tests.dashboard_office`` serves it until Ctrl-C, for looking at it by hand. The engines' scheduler, the
records, the application and the page are the real ones; the model says one text, and takes its time for every token.
Machines, memory and the hour before are made up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import uvicorn

from engine.batch import StepBatch, StepOutput
from engine.core.async_engine import AsyncEngine
from engine.core.engine_core import EngineCore
from engine.interfaces import PendingStep
from engine.request import SamplingParams
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler
from serve_app.autoscaling.journal import NotedScaling, ScalingHistory
from serve_app.errors import NoReplicaError, ReplicaLostError
from serve_app.ingress.auth import KeyBook
from serve_app.ingress.fleet import IngressFamilies, ServedModel
from serve_app.ingress.http_app import HttpSettings, build_http_app
from serve_app.ingress.observing import IngressView
from serve_app.protocol import Deltas, GenerateCall, ReplicaStatus, Route
from serve_app.replica.calls import CallRunner
from serve_app.routing.decision import Candidate, Decision, Reason
from serve_app.routing.journal import JOURNAL
from serve_app.telemetry.logs import LogConfig
from serve_app.telemetry.observer import Failure, ReplicaFamilies, ReplicaObserver, ReplicaView
from serve_app.telemetry.record import ReplicaName
from serve_app.telemetry.recorder import Tokens
from tests.fleet_nodes import free_port
from tests.serve_fakes import SpeakingRunner, chat_tokenizer

GIB = 2**30
SLOTS = 8
BLOCK_SIZE = 16
NUM_BLOCKS = 1200
BLOCK_BYTES = 10 * 2**20
STEP_S = 0.03
PROMPT_TOKEN_S = 0.0025
ANSWER = (
    "Sunlight holds every colour, and air scatters the short waves of blue far more than the long ones of red. So "
    "blue light reaches your eyes from all over the sky, while red comes straight from the sun. Near sunset the way "
    "through the air is longer, the blue is gone, and what is left is orange."
)
PEOPLE = ("anna", "ben", "chloe", "dmitri", "elif", "farid", "grace", "hugo", "ines", "jonas")
MODELS = (ServedModel("office-30b", 1_700_000_000),)


class UnhurriedRunner(SpeakingRunner):
    """Takes as long as a Mac might, without computing anything."""

    def __init__(self) -> None:
        super().__init__(ANSWER)

    def launch(self, batch: StepBatch) -> PendingStep:
        elapsed_s = STEP_S + PROMPT_TOKEN_S * (batch.num_tokens - len(batch.rows))
        threading.Event().wait(elapsed_s)
        return _Done(replace(super().launch(batch).result(), elapsed_s=elapsed_s))


@dataclass(frozen=True, slots=True)
class _Done:
    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


class OfficeMac:
    """One Mac. ``alive`` False: it answers nobody any more."""

    def __init__(self, number: int) -> None:
        self.name = ReplicaName(f"replica-{number}", f"node-{number}", f"mac-studio-{number}")
        self.alive = True
        self._tokenizer = chat_tokenizer()
        self.engine = AsyncEngine.in_thread(self._core, self._tokenizer)
        self.observer = ReplicaObserver(self.name, LogConfig(calls=False), 4096, None)
        self._foreign_bytes = (9 + 3 * number) * GIB

    async def start(self) -> None:
        await self.engine.start()
        self.runner = CallRunner(
            self.engine,
            self._tokenizer,
            flush_interval_s=0.03,
            max_waiting_requests=64,
            recorder=self.observer.recorder(self.engine.holds),
        )

    async def close(self) -> None:
        await self.engine.close()
        self.runner.close()

    def status(self) -> ReplicaStatus:
        name = self.name
        return ReplicaStatus(
            name.replica_id, name.node_id, name.host, "office-30b", True, self.runner.num_open, self.engine.status()
        )

    @property
    def load(self) -> int:
        return self.runner.num_open

    def _core(self) -> EngineCore:
        runner = UnhurriedRunner()
        config = SchedulerConfig(
            slots=SLOTS,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=4096,
            eos_token_ids=runner.facts.eos_token_ids,
            target_stall_s=0.3,
            max_chunk_tokens=256,
        )
        scheduler = Scheduler(config)
        return EngineCore(scheduler, runner, time.monotonic, slots_asked="8", memory=lambda: self._memory(scheduler))

    def _memory(self, scheduler: Scheduler) -> dict[str, float | int | str | None]:
        stats = scheduler.stats(time.monotonic())
        held = stats.num_blocks_total - stats.num_blocks_free - stats.num_blocks_cached
        pool, own = NUM_BLOCKS * BLOCK_BYTES, 19 * GIB
        return {
            "machine_bytes": 64 * GIB,
            "foreign_bytes": self._foreign_bytes,
            "weights_bytes": 17 * GIB,
            "runtime_bytes": GIB // 2,
            "activations_bytes": GIB,
            "mlx_cache_limit_bytes": GIB // 2,
            "kv_pool_bytes": pool,
            "kv_held_bytes": held * BLOCK_BYTES,
            "cached_prefix_bytes": stats.num_blocks_cached * BLOCK_BYTES,
            "headroom_bytes": 8 * GIB,
            "unassigned_bytes": 64 * GIB - self._foreign_bytes - own - pool - 8 * GIB,
            "available_bytes": 64 * GIB - self._foreign_bytes - own - pool,
            "used_bytes": own + pool,
            "pressure": "normal",
            "guard_stage": "calm",
            "guard_last_event": None,
        }


class Office:
    """The fleet of them, with a router that keeps a person's requests on one Mac."""

    models = MODELS

    def __init__(self, num_macs: int = 3) -> None:
        self.macs = [OfficeMac(number) for number in range(1, num_macs + 1)]
        self._homes: dict[str, str] = {}
        self.is_mute = False

    def open(self, call: GenerateCall) -> AbstractAsyncContextManager[AsyncIterator[Deltas]]:
        alive = sorted((mac for mac in self.macs if mac.alive), key=lambda mac: mac.load)
        if not alive:
            raise NoReplicaError("No Mac answers.")
        home = next((mac for mac in alive if mac.name.replica_id == self._homes.get(call.user)), None)
        stays = home is not None and home.load <= alive[0].load + 6
        mac = home if home is not None and stays else alive[0]
        reason = Reason.CACHED if stays else Reason.COLD if home is None else Reason.MOVED
        self._homes[call.user] = mac.name.replica_id
        decision = _decision(call, mac, next(other for other in [*alive[1:], alive[0]]), reason)
        JOURNAL.note(decision)
        route = Route(mac.name.replica_id, reason.value, decision.chosen.total_s, 0, len(alive), time.time())
        return self._open(mac, replace(call, route=route), decision)

    @asynccontextmanager
    async def _open(
        self, mac: OfficeMac, call: GenerateCall, decision: Decision
    ) -> AsyncIterator[AsyncIterator[Deltas]]:
        async with aclosing(mac.runner.generate(call)) as messages:
            yield _Stream(messages, mac, decision)

    async def statuses(self) -> Sequence[ReplicaStatus]:
        return [mac.status() for mac in self.macs if mac.alive]

    async def views(self) -> Sequence[ReplicaView]:
        if self.is_mute:
            raise NoReplicaError("Nobody is there to be asked.")
        return [mac.observer.view(mac.status()) for mac in self.macs if mac.alive]

    async def families(self) -> Sequence[ReplicaFamilies]:
        return [mac.observer.families(mac.status()) for mac in self.macs if mac.alive]

    async def ingress_families(self) -> Sequence[IngressFamilies]:
        return []

    async def ingress_views(self) -> Sequence[IngressView]:
        return []

    async def scaling(self) -> Mapping[str, ScalingHistory]:
        at_s = time.time()
        work = "{} running + {} waiting + 0 in routers on 8 slots each at 75%"
        history = ScalingHistory()
        for age_s, before, after, running, waiting in ((2800, 2, 1, 3, 0), (1500, 1, 2, 8, 3), (240, 2, 3, 15, 4)):
            reason = f"{before} -> {after}: {work.format(running, waiting)}"
            history = history.plus(NotedScaling(at_s - age_s, before, after, reason))
        return {MODELS[0].name: history}


class _Stream:
    """Messages, with the decision that the answer's headers tell."""

    def __init__(self, messages: AsyncIterator[Deltas], mac: OfficeMac, decision: Decision) -> None:
        self._messages = messages
        self._mac = mac
        self.decision = decision

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> Deltas:
        message = await anext(self._messages)
        if not self._mac.alive:
            raise ReplicaLostError("The machine that was answering is silent.")
        return message


def _decision(call: GenerateCall, mac: OfficeMac, other: OfficeMac, reason: Reason) -> Decision:
    num_prompt = sum(len(str(message["content"])) for message in call.messages)
    num_cached = int(0.8 * num_prompt) if reason is Reason.CACHED else 0

    def candidate(of: OfficeMac, num: int) -> Candidate:
        wait_s, reread_s = 0.25 * of.load, PROMPT_TOKEN_S * (num_prompt - num)
        return Candidate(of.name.replica_id, wait_s + reread_s, wait_s, 0.0, reread_s, 0.0, 0.0, 0.0, num)

    alternatives = () if other is mac else (candidate(other, 0),)
    chosen = candidate(mac, num_cached)
    return Decision(call.request_id, reason, chosen, alternatives, (), num_prompt, 3, time.time())


class Load:
    """Everybody asks, reads, and asks on: conversations that grow, a document now and then."""

    def __init__(self, office: Office, num_people: int = 24) -> None:
        self._office = office
        self._num_people = num_people
        self._numbers = itertools.count(1)

    async def run(self) -> None:
        await asyncio.gather(*(self._person(number) for number in range(self._num_people)))

    async def _person(self, number: int) -> None:
        draw = random.Random(number)
        name = PEOPLE[int(len(PEOPLE) * (number / self._num_people) ** 1.5)]
        await asyncio.sleep(draw.uniform(0, 3))
        while True:
            text = f"{name} {number} asks again. "
            for _ in range(draw.randint(1, 4)):
                text += "x" * draw.choice((150, 300, 500, 1200))
                with contextlib.suppress(ReplicaLostError, NoReplicaError):
                    await self._ask(name, text, draw.randint(60, 280))
                await asyncio.sleep(draw.expovariate(1.0))

    async def _ask(self, name: str, text: str, max_tokens: int) -> None:
        call = GenerateCall(
            f"chatcmpl-{next(self._numbers)}",
            MODELS[0].name,
            messages=({"role": "user", "content": text},),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=max_tokens,
            user=name,
            key_name=name,
        )
        async with self._office.open(call) as messages:
            async for _ in messages:
                pass


def make_up_an_hour(office: Office) -> None:
    """Fill the hour before with a quiet first half and a busy second one, and two failures."""
    draw, now_s = random.Random(3), time.time()
    for mac in office.macs:
        hour = mac.observer._recent.hour
        for age in range(59, -1, -1):
            at_s = now_s - 60 * age
            busy = 0.35 + 0.5 / (1 + math.exp((age - 28) / 4)) + 0.12 * math.sin(age / 3) + draw.uniform(-0.05, 0.05)
            num = int(9000 * max(0.02, busy) * (now_s % 60 / 60 if age == 0 else 1))
            gaps_s = [draw.lognormvariate(math.log(0.028 + 0.01 * busy), 0.2) for _ in range(80)]
            gaps_s += [draw.uniform(0.1, 0.32) for _ in range(int(8 * busy))]
            hour.tokens(Tokens(num, gaps_s, [(int(num * 2.4), int(num * 2.4 * draw.uniform(0.5, 0.72)))]), at_s)
            minute = hour._minutes[-1]
            minute.num_calls += num // 180
            for _ in range(num // 180):
                wait_s = draw.expovariate(1 / (0.02 + 2.2 * max(0.0, busy - 0.55)))
                _count(minute.queue, wait_s)
                _count(minute.ttft, wait_s + draw.lognormvariate(math.log(0.35), 0.5))
    failures = office.macs[-1].observer._recent.failures
    for age_s, key, code, sentence in (
        (1900, "hugo", "context_length_exceeded", "hugo context_length_exceeded after 41 ms"),
        (700, "elif", "request_timeout", "elif request_timeout after 600000 ms; waited 12 ms, prefill 3100 ms"),
    ):
        failures.append(Failure(now_s - age_s, f"chatcmpl-{code}", key, code, sentence))
        office.macs[-1].observer._recent.hour._minutes[-1].num_failed += 1


def _count(buckets: dict[int, int], value_s: float) -> None:
    from serve_app.telemetry.hour import count

    count(buckets, value_s)


@dataclass
class Served:
    """A running office. ``call`` runs a coroutine where the office lives."""

    url: str
    office: Office
    loop: asyncio.AbstractEventLoop

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)


@contextmanager
def served_office(*, book: KeyBook | None = None, busy: bool = True, port: int | None = None) -> Iterator[Served]:
    """Serve an office from a thread; ``busy`` fills it with people."""
    ready = threading.Event()
    found: list[Served] = []
    stop: list[asyncio.Event] = []
    failed: list[BaseException] = []

    async def main() -> None:
        office = Office()
        await asyncio.gather(*(mac.start() for mac in office.macs))
        settings = HttpSettings(2**20, 600.0, 10.0)
        app = build_http_app(office, settings, book)
        chosen = port or free_port()
        server = uvicorn.Server(uvicorn.Config(app, port=chosen, log_level="error", lifespan="off"))
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        serving = asyncio.create_task(server.serve())
        load = asyncio.create_task(Load(office).run()) if busy else None
        if busy:
            make_up_an_hour(office)
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        stop.append(asyncio.Event())
        found.append(Served(f"http://127.0.0.1:{chosen}", office, asyncio.get_running_loop()))
        ready.set()
        await stop[0].wait()
        if load is not None:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
        server.should_exit = server.force_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        await asyncio.gather(*(mac.close() for mac in office.macs))

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="office", daemon=True)
    thread.start()
    ready.wait(60)
    if failed:
        raise failed[0]
    try:
        yield found[0]
    finally:
        found[0].loop.call_soon_threadsafe(stop[0].set)
        thread.join(30)


if __name__ == "__main__":
    with served_office(port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000) as running:
        print(f"{running.url}/dashboard")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
