"""How many slots a machine gets: the count that serves most full-length sequences at once.

Owns: the spelling of ``slots``, the balance between slots and KV blocks, and the cap by measured gain.
Must not know: where the bytes come from; the pool size arrives as a function of the slot count.

Every slot costs memory of its own (recurrent state, sampler rows), so each one takes blocks away from the
pool: past some count more slots serve fewer full-length sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from engine.config import MAX_SLOTS, Slots
from engine.errors import ConfigError, MemoryPlanError

SlotsAsked = int | Literal["auto"]

# A larger slot count has to gain at least ratio**MIN_ELASTICITY in total speed, 15% for twice the slots:
# below that it only makes every stream slower.
MIN_ELASTICITY = 0.2

_SPELLING: TypeAdapter[SlotsAsked] = TypeAdapter(Slots)


@dataclass(frozen=True, slots=True)
class SlotBalance:
    """``slots`` full-length sequences fit in ``num_blocks`` blocks at the same time."""

    slots: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SlotCap:
    """A slot count lowered for ``reason``."""

    slots: int
    reason: str


def parse_slots(text: str) -> SlotsAsked:
    """Read "auto" or a whole number. Raises ConfigError that names both spellings for anything else."""
    try:
        return _SPELLING.validate_python(text, strict=True)
    except ValidationError as error:
        raise ConfigError(f"`slots` is {text!r}.", f'write "auto" or a whole number from 1 to {MAX_SLOTS}') from error


def describe_slots(asked: SlotsAsked, slots: int) -> str:
    """What was asked and what it became: "auto:6", or "4" for an explicit count, which is never changed."""
    return f"auto:{slots}" if asked == "auto" else str(asked)


def slot_ceiling(asked: SlotsAsked) -> int:
    """The most slots that ``asked`` can become."""
    return MAX_SLOTS if asked == "auto" else asked


def blocks_per_sequence(max_model_len: int, block_size: int) -> int:
    """Blocks that admission counts for a full-length sequence: its positions and room for one token more."""
    return max_model_len // block_size + 1


def balance_slots(max_slots: int, num_blocks_at: Callable[[int], int], num_blocks_per_sequence: int) -> SlotBalance:
    """Return the slot count that serves most full-length sequences at once; the smaller one on a tie.

    ``num_blocks_at(n)`` is the size of the pool beside ``n`` slots; zero or less means that ``n`` slots
    leave no memory. It need not be monotone, so all counts are tried. The returned count is what the pool
    admits, never more.

    Raises MemoryPlanError when no count leaves memory, or when no pool holds one full-length sequence.
    """
    num_blocks_per_sequence = max(1, num_blocks_per_sequence)
    best = SlotBalance(0, 0)
    for slots in range(1, max_slots + 1):
        num_blocks = num_blocks_at(slots)
        admitted = min(slots, num_blocks // num_blocks_per_sequence)
        # While nothing is admitted, the largest pool is kept for the error text.
        if admitted > best.slots or (best.slots == 0 and num_blocks > best.num_blocks):
            best = SlotBalance(admitted, num_blocks)
    if best.num_blocks == 0:
        raise MemoryPlanError(
            f"No slot count from 1 to {max_slots} leaves memory for KV blocks.", "give the engine more memory"
        )
    if best.slots == 0:
        raise MemoryPlanError(
            f"One full-length sequence needs {num_blocks_per_sequence} KV blocks "
            f"and the largest pool holds {best.num_blocks}.",
            "lower `max_model_len`",
        )
    return best


def knee(gains: Mapping[int, float]) -> int | None:
    """Return the smallest measured slot count that no larger one beats by enough, or None while gains go on.

    ``gains`` maps a slot count to the machine's total decode speed with that many slots busy over that with one. The
    gain that is enough is ``MIN_ELASTICITY``. None: the largest measured count still paid, and nothing is known
    beyond it.
    """
    counts = sorted(gains)
    for index, count in enumerate(counts):
        larger = counts[index + 1 :]
        if larger and not any(_pays(gains, count, more) for more in larger):
            return count
    return None


def cap_at_knee(slots: int, gains: Mapping[int, float]) -> SlotCap | None:
    """Return a lower count and its reason when the measured gain flattens before ``slots``."""
    count = knee(gains)
    if count is None or count >= slots:
        return None
    more = min(k for k in gains if k > count)
    reason = (
        f"memory holds {slots} slots, but the measured gain flattens at {count}: {gains[count]:.2f} times the speed "
        f"of one, {gains[more]:.2f} with {more}"
    )
    return SlotCap(count, reason)


def _pays(gains: Mapping[int, float], count: int, more: int) -> bool:
    return gains[more] >= gains[count] * math.pow(more / count, MIN_ELASTICITY)
