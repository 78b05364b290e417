"""Answers a call that embeds: prompts in, one vector for each.

Owns: how many of a call's prompts are with the engine at once, cutting and scaling vectors. Must not know: HTTP, MLX.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing

import numpy as np

from engine.core.async_engine import AsyncEngine
from engine.core.generation import GenerationDelta, GenerationRequest
from engine.errors import InvalidParameterError
from engine.interfaces import ModelFacts
from serve_app.errors import UnsupportedParameterError
from serve_app.protocol import ChoiceDelta, Deltas, GenerateCall, Usage
from serve_app.replica.stream import batches

_Numbered = tuple[int, GenerationRequest]


def require_embeddings(call: GenerateCall, facts: ModelFacts) -> None:
    """Raise UnsupportedParameterError for a model that gives none, InvalidParameterError for too many dimensions."""
    size = facts.embedding_size
    if size is None:
        raise UnsupportedParameterError(f"The model `{call.model}` writes text; it gives no embeddings.", "model")
    if call.dimensions is not None and call.dimensions > size:
        raise InvalidParameterError(f"An embedding of this model has {size} dimensions at most.", "dimensions")


async def embed(
    engine: AsyncEngine,
    requests: Sequence[GenerationRequest],
    *,
    dimensions: int | None,
    num_at_once: int,
    flush_interval_s: float,
    note: Callable[[Sequence[tuple[int, GenerationDelta]]], None] = lambda _arrived: None,
) -> AsyncGenerator[Deltas, None]:
    """Yield the vectors as they are made, in no order; the last message has the usage. ``note`` sees every delta, with
    the number of its prompt.

    A thousand prompts in one call must neither fill the engine's queue nor be refused for it: ``num_at_once`` of them
    are given to it, and another for each that is done.
    """
    waiting = iter(enumerate(requests))
    workers = [_work(engine, waiting) for _ in range(min(num_at_once, len(requests)))]
    num_left, num_cached_tokens = len(requests), 0
    async with aclosing(batches(workers, lambda: flush_interval_s)) as arriving:
        async for arrived in arriving:
            done = [(index, delta) for _, (index, delta) in arrived]
            note(done)
            num_left -= len(done)
            num_cached_tokens += sum(delta.num_cached_tokens for _, delta in done)
            usage = None
            if num_left == 0:
                usage = Usage(sum(len(r.prompt_token_ids) for r in requests), 0, num_cached_tokens)
            yield Deltas(tuple(_choice(index, delta, dimensions) for index, delta in done), usage)


async def _work(engine: AsyncEngine, waiting: Iterator[_Numbered]) -> AsyncGenerator[tuple[int, GenerationDelta], None]:
    for index, request in waiting:
        async with aclosing(engine.generate(request)) as deltas:
            async for delta in deltas:
                yield index, delta


def _choice(index: int, delta: GenerationDelta, dimensions: int | None) -> ChoiceDelta:
    assert delta.embedding is not None, "a request that embeds brought no embedding"
    return ChoiceDelta(index, embedding=unit_vector(delta.embedding, dimensions))


def unit_vector(raw: bytes, dimensions: int | None) -> bytes:
    """The first ``dimensions`` of float32 numbers (None: all), scaled to length 1, in little-endian order."""
    vector = np.frombuffer(raw, dtype=np.float32)[:dimensions].astype(np.float64)
    length = np.linalg.norm(vector)
    return (vector / length if length > 0 else vector).astype("<f4").tobytes()
