"""The policy over three real engines of this process: a crowd with one prompt, while every engine stands still."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.core.async_engine import AsyncEngine
from engine.core.engine_core import EngineCore
from engine.request import SamplingParams
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler
from serve_app.protocol import GenerateCall
from serve_app.replica.calls import CallRunner
from serve_app.replica.reporter import Reporter
from serve_app.routing.decision import Decision
from serve_app.routing.keys import place_of, prefix_of
from serve_app.routing.policy import RoutingPolicy, RoutingRequest
from tests.fleet_replicas import BLOCK_SIZE, CostlyRunner
from tests.serve_fakes import chat_tokenizer

QUESTION = {"role": "user", "content": "question 0 " * 20}


class Mac:
    """One engine with four slots, its calls and its reports."""

    def __init__(self, name: str, gate: Path) -> None:
        self.name = name
        tokenizer = chat_tokenizer()
        self.engine = AsyncEngine.in_thread(lambda: _core(gate), tokenizer)
        self._calls = CallRunner(self.engine, tokenizer, flush_interval_s=0.03, max_waiting_requests=64)
        self.reporter = Reporter(block_size=BLOCK_SIZE, prefix_cache="shared")

    async def answer(self, call: GenerateCall) -> None:
        with self.reporter.counted(call) as record:
            async with aclosing(self._calls.generate(call)) as messages:
                async for message in messages:
                    record.note(message)

    async def close(self) -> None:
        await self.engine.close()
        self._calls.close()


class Fleet:
    """Three Macs and one router, which hears them when the test says so."""

    def __init__(self, gate: Path) -> None:
        self.macs = {name: Mac(name, gate) for name in "abc"}
        self._policy = RoutingPolicy()
        self._num_asked = 0

    async def __aenter__(self) -> Fleet:
        for mac in self.macs.values():
            await mac.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        async with AsyncExitStack() as stack:
            for mac in self.macs.values():
                stack.push_async_callback(mac.close)

    def report(self) -> None:
        for name, mac in self.macs.items():
            self._policy.report(name, name, mac.reporter.report(mac.engine.status(), ready=True), 0.0)

    def ask(self, messages: list[Any], max_tokens: int) -> tuple[Decision, asyncio.Task[None]]:
        self._num_asked += 1
        sampling = SamplingParams(temperature=0.0)
        call = GenerateCall(f"q{self._num_asked}", "chain", tuple(messages), sampling=sampling, max_tokens=max_tokens)
        call = replace(call, prefix=prefix_of(call))
        request = RoutingRequest(call.request_id, call.prefix, place_of("", call.prefix))
        decision = self._policy.choose(request, 0.0)
        assert decision is not None
        return decision, asyncio.create_task(self._answer(decision.chosen.replica, call))

    async def _answer(self, name: str, call: GenerateCall) -> None:
        self._policy.taken(call.request_id, name, 0.0)
        await self.macs[name].answer(call)
        self._policy.came_back(call.request_id, name)


async def test_a_crowd_is_spread_over_all_slots_and_a_conversation_leaves_the_crowd(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with Fleet(gate) as fleet:
        fleet.report()
        # A usual answer takes many times as long as reading the prompt.
        for max_tokens in (300, 2):
            first, answering = fleet.ask([QUESTION], max_tokens)
            await answering
        # The engine's thread says so a moment after the last token.
        home = fleet.macs[first.chosen.replica].engine
        async with asyncio.timeout(10):
            while home.status().scheduler.usual_answer_s is None:  # noqa: ASYNC110 - a thread makes it true
                await asyncio.sleep(0.01)
        gate.touch()
        crowd = []
        for number in range(11):
            if number in (0, 6):
                fleet.report()
            crowd.append(fleet.ask([QUESTION], 2))
            await asyncio.sleep(0)
        fleet.report()
        more = [QUESTION, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "and then?"}]
        second, answering = fleet.ask(more, 2)
        gate.unlink()
        await asyncio.gather(answering, *(task for _, task in crowd))
    assert sorted(Counter(decision.chosen.replica for decision, _ in crowd).values()) == [3, 4, 4]
    assert second.chosen.wait_s == 0.0
    assert second.chosen.replica != first.chosen.replica


def _core(gate: Path) -> EngineCore:
    runner = CostlyRunner(gate)
    config = SchedulerConfig(
        slots=4,
        num_blocks=2048,
        block_size=BLOCK_SIZE,
        max_model_len=4096,
        eos_token_ids=runner.facts.eos_token_ids,
        max_waiting_requests=64,
    )
    return EngineCore(Scheduler(config), runner, time.monotonic, slots_asked="4")
