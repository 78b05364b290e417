"""A replica whose engine is a process with the chain model."""

from __future__ import annotations

from engine.core.async_engine import AsyncEngine
from engine.text.tokenizer import Tokenizer
from serve_app.replica.deployment import MetalReplica
from serve_app.replica.startup_board import BoardWriter
from tests.faults.harness import CHAIN_COMMAND, TEARDOWN_S
from tests.serve_fakes import chat_tokenizer


class ProcessReplica(MetalReplica):
    """Like the real one, with other weights."""

    async def load(self, board: BoardWriter) -> tuple[Tokenizer, AsyncEngine]:
        """Start the engine's process."""
        board.progress("starting the chain model")
        tokenizer = chat_tokenizer()
        command = (*CHAIN_COMMAND, "--step-s", "0.01")
        engine = AsyncEngine.in_process(self._model.engine, tokenizer, command=command, teardown_s=TEARDOWN_S)
        await engine.start()
        return tokenizer, engine
