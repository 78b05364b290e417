"""The scheduler's numbers, resolved: no "auto" is left here.

Owns: the frozen configuration and its bounds. Must not know: where the numbers come from (memory plan, model, user).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.memory.window_blocks import WindowConfig

PrefixCacheMode = Literal["shared", "per-user", "off"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """``slots`` rows and ``num_blocks`` blocks of ``block_size`` positions; prompt and answer fit in ``max_model_len``.

    ``admission_watermark_tokens``: how much of a request's coming answer is reserved when it is admitted.
    ``target_stall_s``: how long a step may take for a prompt's sake while others are decoding.
    ``max_chunk_tokens``: prompt tokens in one step at most. ``revision`` separates prefix caches of different weights.
    ``max_steps_in_flight``: steps that may be launched before the first result is read. ``num_state_snapshots``: room
    for saved recurrent states, for models that have any; None for the others. ``max_draft_tokens``: guesses that
    a row may carry along, 0 for none. ``window``: the pool of sliding-window layers, where they have one of their own.
    """

    slots: int
    num_blocks: int
    block_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    max_waiting_requests: int = 256
    max_waiting_tokens: int = 1_000_000
    admission_watermark_tokens: int = 256
    target_stall_s: float = 0.5
    max_chunk_tokens: int = 512
    prefix_cache: PrefixCacheMode = "shared"
    revision: str = ""
    max_steps_in_flight: int = 1
    num_state_snapshots: int | None = None
    max_draft_tokens: int = 0
    window: WindowConfig | None = None

    def __post_init__(self) -> None:
        for name in ("slots", "num_blocks", "block_size", "max_chunk_tokens", "max_steps_in_flight"):
            assert getattr(self, name) >= 1, f"{name} is {getattr(self, name)}, at least 1 is needed"
        assert self.max_model_len >= 2, "a context holds a prompt token and an answer token"
        assert self.target_stall_s > 0, "a stall target is longer than nothing"
