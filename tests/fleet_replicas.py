"""Replicas for fleets of several nodes: the chain model with a cost, so that a prompt read again is felt."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from engine.batch import StepBatch, StepOutput
from engine.core.async_engine import AsyncEngine
from engine.core.engine_core import EngineCore
from engine.interfaces import PendingStep
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler
from engine.text.tokenizer import Tokenizer
from serve_app.replica.deployment import MetalReplica
from serve_app.replica.startup_board import BoardWriter
from tests.core_fakes import FACTS, ChainRunner
from tests.fleet_nodes import Fleet
from tests.serve_fakes import chat_tokenizer

STEP_S = 0.004
TOKEN_S = 0.0004
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
NUM_BLOCKS = 2048
NUM_MACS = 3


class CostlyRunner(ChainRunner):
    """Takes its time for every step and for every token in it, as a machine does. It waits, it does not compute.

    A step says that it took the time it should have taken, so what replicas learn of themselves depends on no machine.
    While the file ``gate`` exists no step ends.
    """

    def __init__(self, gate: Path) -> None:
        super().__init__(facts=replace(FACTS, max_model_len=MAX_MODEL_LEN))
        self._shut_while = gate

    def launch(self, batch: StepBatch) -> PendingStep:
        """Wait, then sample."""
        elapsed_s = STEP_S + TOKEN_S * sum(row.num_tokens for row in batch.rows)
        threading.Event().wait(elapsed_s)
        while self._shut_while.exists():
            threading.Event().wait(STEP_S)
        return _Done(replace(super().launch(batch).result(), elapsed_s=elapsed_s))


@dataclass(frozen=True, slots=True)
class _Done:
    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


class FleetReplica(MetalReplica):
    """Four slots, and room for some thirty conversations of a thousand tokens. Its model's name is a gate's file."""

    async def load(self, board: BoardWriter) -> tuple[Tokenizer, AsyncEngine]:
        """Make the engine; nothing is read from disk."""
        tokenizer = chat_tokenizer()
        engine = AsyncEngine.in_thread(self._core, tokenizer)
        await engine.start()
        return tokenizer, engine

    def _core(self) -> EngineCore:
        runner = CostlyRunner(Path(self._model.engine.model))
        config = SchedulerConfig(
            slots=4,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=runner.facts.eos_token_ids,
            max_waiting_requests=self._model.engine.max_waiting_requests,
            prefix_cache=self._model.engine.prefix_cache,
            max_steps_in_flight=runner.max_steps_in_flight,
        )
        return EngineCore(Scheduler(config), runner, time.monotonic, slots_asked="4")


def deploy(fleet: Fleet, router: str, *, model: str = "demo", num_ingresses: int = NUM_MACS) -> None:
    """Deploy them on ``NUM_MACS`` nodes behind ``router``, and wait until the app answers."""
    engine = {"model": model, "slots": 4, "block_size": BLOCK_SIZE}
    models = [{"name": "chain", "replicas": NUM_MACS, "engine": engine}]
    replica = {"shutdown_grace_s": 1.0, "router": router}
    fleet.deploy(f"{__name__}:FleetReplica", models=models, replica=replica, ingress={"replicas": num_ingresses})
