"""A replica with the chain model in place of a real one: fast, and its answers can be foretold."""

from __future__ import annotations

from engine.core.async_engine import AsyncEngine
from engine.text.tokenizer import Tokenizer
from serve_app.replica.deployment import MetalReplica
from serve_app.replica.startup_board import BoardWriter
from tests.core_fakes import ChainRunner, make_core
from tests.serve_fakes import chat_tokenizer

STEP_S = 0.002


class ChainReplica(MetalReplica):
    """Answers with the chain model, a step of which takes two milliseconds."""

    async def load(self, board: BoardWriter) -> tuple[Tokenizer, AsyncEngine]:
        """Make the engine; nothing is read from disk."""
        board.progress("making the chain model")
        tokenizer = chat_tokenizer()
        engine = AsyncEngine.in_thread(lambda: make_core(ChainRunner(step_s=STEP_S), slots=8), tokenizer)
        await engine.start()
        return tokenizer, engine
