"""What a memory plan is made from: the machine, the model's bytes, the wishes, and the limit they give the engine.

Owns: ``PlanInputs``, and how much of the machine the engine may use. Must not know: how slots and blocks are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.config import EngineConfig
from engine.memory.slots import SlotsAsked, blocks_per_sequence
from engine.memory.window_blocks import most_ahead_tokens, num_blocks_needed

GIB = 2**30
MIB = 2**20

# Free memory kept for what the person's other programs will want next, beyond what they hold at start.
MIN_HEADROOM_BYTES = 2 * GIB
MAX_HEADROOM_BYTES = 16 * GIB
HEADROOM_SHARE = 8
# An idle macOS desktop, when the machine itself cannot be asked.
UNKNOWN_FOREIGN_BYTES = 4 * GIB
# Rows of float32 over the vocabulary that sampling holds per slot: logits, scaled and biased logits, sort keys and
# indices, probabilities, their running sum, noise.
SAMPLER_ROWS = 8
_FLOAT32_BYTES = 4
# Saved recurrent states beside each slot's own: one at the prompt's end, one that follows the answer. What running
# requests do not use keeps the ends of finished conversations.
STATE_SNAPSHOTS_PER_SLOT = 2
# Every layer's arrays have one block more than the scheduler knows: it pads block tables and stays zero.
NULL_BLOCKS = 1
# The most steps that any runner has in flight.
STEPS_IN_FLIGHT = 2

Source = Literal["measured", "computed", "configured", "unknown"]


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """The machine's memory at one moment; None is unknown.

    ``available_bytes``: what programs can still get without swapping. ``own_bytes``: this process at that moment.
    ``working_set_bytes``: what the GPU may hold at once (Metal's recommended maximum). ``max_buffer_bytes``: the
    longest single GPU buffer.
    """

    total_bytes: int
    available_bytes: int | None = None
    own_bytes: int | None = None
    working_set_bytes: int | None = None
    max_buffer_bytes: int | None = None

    @property
    def foreign_bytes(self) -> int | None:
        """What other programs and the system hold."""
        if self.available_bytes is None or self.own_bytes is None:
            return None
        return max(0, self.total_bytes - self.available_bytes - self.own_bytes)


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """What one model takes, measured after loading or computed from its files; ``sources`` tells which, by term.

    ``weights_bytes``: as held, not as on disk. ``kv_bytes_per_token``: K and V of all layers, of which
    ``window_bytes_per_token`` belong to sliding-window layers with a pool of their own, that see ``window_tokens``.
    ``buffer_bytes_per_token``: what a token takes in the largest single buffer that the pool consists of, 0 where that
    does not matter. ``state_bytes_per_slot``: recurrent state. ``activation_bytes``: the highest extra use during a
    step of the largest chunk at full context, ``activation_bytes_per_slot``: what each decoding row at full context
    adds to it. ``runtime_bytes``: interpreter and libraries, before weights.
    ``cache_limit_bytes``: freed buffers that MLX may keep.
    """

    weights_bytes: int
    kv_bytes_per_token: int
    vocab_size: int
    window_bytes_per_token: int = 0
    window_tokens: int = 0
    state_bytes_per_slot: int = 0
    buffer_bytes_per_token: int = 0
    activation_bytes: int = 0
    activation_bytes_per_slot: int = 0
    runtime_bytes: int = 0
    cache_limit_bytes: int = 0
    sources: Mapping[str, Source] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything a plan depends on.

    ``budget_bytes`` and ``headroom_bytes``: None is "auto". ``max_draft_tokens``: guesses that a decode row may carry.
    ``gains``: total decode speed by slot count over that of
    one slot, as measured on this machine; empty when nothing is measured.
    """

    machine: MachineMemory
    model: ModelBytes
    max_model_len: int
    block_size: int = 16
    slots_asked: SlotsAsked = "auto"
    prefix_cache: bool = True
    overcommit: Literal["warn", "refuse"] = "warn"
    budget_bytes: int | None = None
    headroom_bytes: int | None = None
    gains: Mapping[int, float] = field(default_factory=dict)
    max_chunk_tokens: int = 512
    max_draft_tokens: int = 0

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        machine: MachineMemory,
        model: ModelBytes,
        max_model_len: int,
        gains: Mapping[int, float] | None = None,
        max_draft_tokens: int = 0,
    ) -> PlanInputs:
        """Join a configuration with what is known of machine and model; ``max_model_len`` is the resolved one."""
        budget, headroom = config.memory.budget, config.memory.headroom
        return cls(
            machine=machine,
            model=model,
            max_model_len=max_model_len,
            block_size=config.block_size,
            slots_asked=config.slots,
            prefix_cache=config.prefix_cache != "off",
            overcommit=config.overcommit,
            budget_bytes=None if budget == "auto" else budget,
            headroom_bytes=None if headroom == "auto" else headroom,
            gains=gains or {},
            max_chunk_tokens=config.prefill.max_chunk_tokens,
            max_draft_tokens=max_draft_tokens,
        )

    @property
    def num_blocks_per_sequence(self) -> int:
        """Blocks of one full-length sequence."""
        return blocks_per_sequence(self.max_model_len, self.block_size)

    @property
    def block_bytes(self) -> int:
        """One KV block of all layers that share the pool."""
        return max(1, self.model.kv_bytes_per_token - self.model.window_bytes_per_token) * self.block_size

    def num_window_blocks(self, slots: int) -> int:
        """Blocks of sliding-window layers with a pool of their own, 0 where there is none: what ``slots`` requests see
        and compute, and half as much again for cached prefixes."""
        if not self.model.window_bytes_per_token:
            return 0
        ahead = most_ahead_tokens(self.max_chunk_tokens, slots * (1 + self.max_draft_tokens), STEPS_IN_FLIGHT)
        needed = num_blocks_needed(self.model.window_tokens, self.block_size, slots, ahead)
        return needed + needed // 2 if self.prefix_cache else needed

    def window_pool_bytes(self, slots: int) -> int:
        """The arrays of that pool, with its null block."""
        num_blocks = self.num_window_blocks(slots)
        return (num_blocks + NULL_BLOCKS) * self.block_size * self.model.window_bytes_per_token if num_blocks else 0

    @property
    def fixed_bytes(self) -> int:
        """What the engine holds whatever the number of slots."""
        return self.model.runtime_bytes + self.model.weights_bytes + self.model.cache_limit_bytes

    def activation_bytes(self, slots: int) -> int:
        """The highest extra use during a step that decodes ``slots`` rows beside the largest chunk."""
        return self.model.activation_bytes + self.model.activation_bytes_per_slot * slots

    def state_bytes(self, slots: int) -> int:
        """Recurrent state of ``slots`` slots and the saved states beside them."""
        return self.model.state_bytes_per_slot * (slots + self.num_state_snapshots(slots))

    def num_state_snapshots(self, slots: int) -> int:
        """Saved states: none without a prefix cache, or without recurrent layers."""
        return STATE_SNAPSHOTS_PER_SLOT * slots if self.prefix_cache and self.model.state_bytes_per_slot else 0

    def sampler_bytes(self, slots: int) -> int:
        """Scratch of ``slots`` sampled rows."""
        return self.model.vocab_size * SAMPLER_ROWS * _FLOAT32_BYTES * slots

    def pool_bytes(self, num_blocks: int) -> int:
        """The pool's arrays: the blocks and the null block that pads block tables."""
        return (num_blocks + NULL_BLOCKS) * self.block_bytes

    def bytes_beside_pool(self, slots: int) -> int:
        """Everything that the engine holds with ``slots`` slots, except the pool."""
        by_slots = self.activation_bytes(slots) + self.state_bytes(slots) + self.sampler_bytes(slots)
        return self.fixed_bytes + by_slots + self.window_pool_bytes(slots)

    def num_blocks_that_fit(self, slots: int) -> int:
        """Blocks that memory allows beside ``slots`` slots; zero or less when nothing is left."""
        left = self.limit_bytes - self.bytes_beside_pool(slots)
        num_blocks = left // self.block_bytes - NULL_BLOCKS
        buffer_bytes = self.model.buffer_bytes_per_token * self.block_size
        if self.machine.max_buffer_bytes is not None and buffer_bytes > 0:
            num_blocks = min(num_blocks, self.machine.max_buffer_bytes // buffer_bytes - NULL_BLOCKS)
        return num_blocks

    @property
    def applied_headroom_bytes(self) -> int:
        """The headroom that counts: as configured; none beside a configured budget; else a share of the machine."""
        if self.headroom_bytes is not None:
            return self.headroom_bytes
        if self.budget_bytes is not None:
            return 0
        headroom = min(max(self.machine.total_bytes // HEADROOM_SHARE, MIN_HEADROOM_BYTES), MAX_HEADROOM_BYTES)
        return headroom + (UNKNOWN_FOREIGN_BYTES if self.machine.foreign_bytes is None else 0)

    @property
    def machine_limit_bytes(self) -> int:
        """The most that the machine can give: what others leave, and what the GPU may hold."""
        limit = self.machine.total_bytes - (self.machine.foreign_bytes or 0) - self.applied_headroom_bytes
        if self.machine.working_set_bytes is not None:
            # The working set bounds GPU buffers; interpreter and libraries live outside it.
            limit = min(limit, self.machine.working_set_bytes + self.model.runtime_bytes)
        return max(0, limit)

    @property
    def limit_bytes(self) -> int:
        """What the engine may use in all."""
        if self.budget_bytes is None:
            return self.machine_limit_bytes
        return min(self.budget_bytes, self.machine_limit_bytes)
