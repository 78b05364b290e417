"""An engine without a model for ``tests.perf.token_path``: it steps by the clock, and keeps when it made each token.

``python -m tests.perf.stamped_engine --fd N --stamps FILE`` is its process, ``StampedReplica`` a replica that has it.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from engine.batch import BatchRow, StepBatch
from engine.config import EngineConfig
from engine.core.async_engine import AsyncEngine
from engine.core.engine_core import EngineCore
from engine.core.messages import OnProgress
from engine.core.process_main import run_engine_process
from engine.interfaces import PendingStep
from engine.text.tokenizer import Tokenizer
from serve_app.replica.deployment import MetalReplica
from serve_app.replica.startup_board import BoardWriter
from tests.core_fakes import FACTS, ChainRunner, make_core
from tests.serve_fakes import chat_tokenizer

STEP_S = 0.02
NUM_STREAMS = 16
MAX_MODEL_LEN = 2048


class StampingRunner(ChainRunner):
    """Ends a step every 20 ms, all rows at once, as a device does. Its tokens are all the same letter."""

    def __init__(self, stamps: Path) -> None:
        super().__init__(facts=replace(FACTS, max_model_len=MAX_MODEL_LEN))
        self._stamps = stamps
        self._made_s: dict[str, tuple[str, list[float]]] = {}
        self._next_s = 0.0

    def launch(self, batch: StepBatch) -> PendingStep:
        """Wait for the next tick."""
        self._next_s = max(self._next_s + STEP_S, time.monotonic())
        threading.Event().wait(self._next_s - time.monotonic())
        return super().launch(batch)

    def release(self, request_ids: Sequence[str]) -> None:
        """Write down when the tokens of an answer were made, after the prompt's text, which says whose they are."""
        super().release(request_ids)
        with self._stamps.open("a") as file:
            for request_id in request_ids:
                if request_id in self._made_s:
                    file.write(json.dumps(self._made_s.pop(request_id)) + "\n")

    def _sample(self, row: BatchRow) -> int:
        prompt = bytes(row.token_ids[: row.num_prompt_tokens]).decode()
        self._made_s.setdefault(row.request_id, (prompt, []))[1].append(time.monotonic())
        return ord("a")


class StampedReplica(MetalReplica):
    """The real one but for the model. Its model's name is the stamps' file."""

    async def load(self, board: BoardWriter) -> tuple[Tokenizer, AsyncEngine]:
        """Start the engine's process."""
        tokenizer = chat_tokenizer()
        command = (sys.executable, "-m", "tests.perf.stamped_engine", "--stamps", self._model.engine.model)
        engine = AsyncEngine.in_process(self._model.engine, tokenizer, command=command)
        await engine.start()
        return tokenizer, engine


def main() -> NoReturn:
    """Be the engine's process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--stamps", type=Path, required=True)
    arguments = parser.parse_args()

    def build(_config: EngineConfig, _on_progress: OnProgress) -> EngineCore:
        return make_core(StampingRunner(arguments.stamps), slots=NUM_STREAMS, num_blocks=4096)

    run_engine_process(arguments.fd, build)


if __name__ == "__main__":
    main()
