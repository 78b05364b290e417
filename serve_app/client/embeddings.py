"""Embeddings for Python tools: one call's vectors.

Owns: the call, and numbers out of its messages. Must not know: how many calls there are.
"""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.request import SamplingParams
from serve_app.client.answers import Ask
from serve_app.protocol import GenerateCall, Prompt
from serve_app.routing.stream import ReplicaStream

Floats = NDArray[np.float32]


async def read_embeddings(handle: Any, call: GenerateCall) -> list[Floats]:
    """Return the vector of each of the call's prompts."""
    found: list[Floats] = [np.empty(0, np.float32)] * call.num_prompts
    async with ReplicaStream(handle, call) as messages:
        async for message in messages:
            for choice in message.choices:
                found[choice.index] = np.frombuffer(choice.embedding, "<f4")
    return found


def embed_call(model: str, inputs: tuple[Prompt, ...], ask: Ask, dimensions: int | None) -> GenerateCall:
    """Return the call for the embeddings of ``inputs``."""
    return GenerateCall(
        request_id=f"py-{uuid.uuid4().hex}",
        model=model,
        prompts=inputs,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        max_tokens=1,
        user=ask.user,
        session_key=ask.session,
        timeout_s=ask.timeout_s,
        embeds=True,
        dimensions=dimensions,
    )
