"""Memory pressure on a real runner: a wave changes when tokens come, never which."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.core.engine_core import EngineCore
from engine.memory.guard import GuardConfig, MemoryGuard, MemoryReading
from engine.memory.guard_driver import GuardDriver
from engine.memory.plan_inputs import GIB
from engine.mlx_backend.loader import describe_model
from engine.mlx_backend.model_runner import MlxModelRunner
from engine.model_source import ModelSource
from engine.request import EngineRequest, SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig
from tests.fakes import FakeClock
from tests.mlx.tiny_models import build

HEADROOM = 2 * GIB
NUM_BLOCKS = 96
STEP_S = 0.5


def run(taken_part_at: Callable[[float], float]) -> tuple[dict[str, list[int]], EngineCore, MemoryGuard]:
    """Twelve requests on four slots, arriving two every ten seconds, each step half a second."""
    model, config = build("llama")
    loaded = describe_model(model, config, ModelSource("tiny", "folder", Path("nowhere"), "r0"), "cpu")
    runner = MlxModelRunner(loaded, num_blocks=NUM_BLOCKS, block_size=16, slots=4, max_chunk_tokens=32)
    settings = SchedulerConfig(
        slots=4,
        num_blocks=NUM_BLOCKS,
        block_size=16,
        max_model_len=512,
        max_chunk_tokens=32,
        max_steps_in_flight=runner.max_steps_in_flight,
    )
    scheduler, clock, guard = Scheduler(settings), FakeClock(), MemoryGuard(GuardConfig(HEADROOM, 8 * GIB))

    class Reader:
        def read(self) -> MemoryReading:
            return MemoryReading(None, int((1 - taken_part_at(clock.now_s)) * HEADROOM), GIB)

    driver = GuardDriver(guard, Reader(), scheduler)
    core = EngineCore(scheduler, runner, clock, memory=guard.status, upkeep=driver.tick)
    tokens: dict[str, list[int]] = {}
    waiting = [request(index) for index in range(12)]
    while waiting or core.has_work or guard.stage:
        while waiting and waiting[0].received_s <= clock.now_s:
            core.add(waiting.pop(0))
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        scheduler.check_invariants()
        clock.advance(STEP_S)
    return tokens, core, guard


def request(index: int) -> EngineRequest:
    prompt = tuple((index * 37 + position * 11) % 200 for position in range(20 + 9 * index))
    sampling = SamplingParams(max_tokens=40, temperature=0.8, seed=index, ignore_eos=True)
    return EngineRequest(f"r{index}", prompt, sampling, received_s=index // 2 * 10.0)


@pytest.mark.parametrize(
    ("taken_part", "actions"),
    [
        (0.8, {"drop_prefixes", "hold_admissions", "resume_admissions", "give_back"}),
        (0.95, {"drop_prefixes", "hold_admissions", "preempt_one", "resume_admissions", "give_back"}),
    ],
)
def test_two_waves(taken_part: float, actions: set[str]) -> None:
    calm, core, _ = run(lambda now_s: 0.0)
    core.close()
    wave, core, guard = run(lambda now_s: taken_part if 15 <= now_s < 45 or 60 <= now_s < 90 else 0.0)
    assert wave == calm
    assert all(len(tokens) == 40 for tokens in wave.values())
    assert {str(event.action) for event in guard.events} == actions
    snapshot = core.snapshot()
    assert snapshot.memory["guard_stage"] == "calm"
    stats = snapshot.scheduler
    assert stats.num_blocks_free + stats.num_blocks_cached == stats.num_blocks_total == NUM_BLOCKS
    core.close()
