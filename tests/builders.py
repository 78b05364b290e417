"""Makers of real types with short defaults, so that a test names only what it is about."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

from engine.request import EngineRequest, SamplingParams
from engine.scheduler.config import SchedulerConfig

EOS = 0
VOCABULARY_SIZE = 997

_request_numbers = count()


def make_config(**changes: object) -> SchedulerConfig:
    """Four slots over 64 blocks of 4 positions; a context of 128 tokens."""
    values: dict[str, object] = {
        "slots": 4,
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 128,
        "eos_token_ids": (EOS,),
        "admission_watermark_tokens": 8,
        "max_chunk_tokens": 16,
        "revision": "test",
    }
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


def make_tokens(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids without EOS, equal for equal seeds; a longer one begins with the shorter."""
    draw = random.Random(seed)
    return tuple(draw.randrange(1, VOCABULARY_SIZE) for _ in range(num_tokens))


def make_request(
    prompt: int | Sequence[int] = 8,
    *,
    request_id: str | None = None,
    received_s: float = 0.0,
    user: str = "",
    priority: int = 0,
    cache_salt: str = "",
    deadline_s: float | None = None,
    fork_of: str | None = None,
    prompt_seed: int | None = None,
    **sampling: object,
) -> EngineRequest:
    """A greedy request. ``prompt``: token ids, or how many; then they are this request's own unless a seed is given."""
    number = next(_request_numbers)
    if isinstance(prompt, int):
        prompt = make_tokens(prompt, seed=number + 1_000_000 if prompt_seed is None else prompt_seed)
    values: dict[str, object] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    return EngineRequest(
        request_id=f"request-{number}" if request_id is None else request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**(values | sampling)),  # type: ignore[arg-type]
        received_s=received_s,
        priority=priority,
        user=user,
        cache_salt=cache_salt,
        deadline_s=deadline_s,
        fork_of=fork_of,
    )
