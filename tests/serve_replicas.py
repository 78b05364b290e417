"""Replicas with the chain model in place of a real one: fast, and their answers can be foretold."""

from __future__ import annotations

import asyncio
from pathlib import Path

from engine.core.async_engine import AsyncEngine
from engine.errors import MemoryPlanError
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
        prefix_cache = self._model.engine.prefix_cache
        engine = AsyncEngine.in_thread(
            lambda: make_core(ChainRunner(step_s=STEP_S), slots=8, prefix_cache=prefix_cache), tokenizer
        )
        await engine.start()
        return tokenizer, engine


class GatedReplica(ChainReplica):
    """Loads until the file that its model names exists."""

    async def load(self, board: BoardWriter) -> tuple[Tokenizer, AsyncEngine]:
        """Wait for the file, then make the engine."""
        gate = Path(self._model.engine.model)
        while not await asyncio.to_thread(gate.exists):  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.02)
        return await super().load(board)


class UnfitReplica(MetalReplica):
    """Finds out while loading that it cannot serve."""

    async def load(self, board: BoardWriter) -> tuple[Tokenizer, AsyncEngine]:
        """Raise what an engine raises whose model does not fit."""
        raise MemoryPlanError("Eight slots need 40 GB; 16 GB are free.", "set `slots: 2`")
