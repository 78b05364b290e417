"""One concrete remedy for a plan that does not add up, tried before it is suggested.

Owns: which settings to change, in which order, and to what. Must not know: how a plan is made; it is asked whether
changed inputs would fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from engine.memory.plan_inputs import GIB, MIB, MachineMemory, PlanInputs

# A shorter context is only suggested while it is one to work with; below it other settings come first.
USEFUL_CONTEXT_TOKENS = 2048
LEAST_CONTEXT_TOKENS = 256
_CONTEXT_STEP_TOKENS = 256
LEAST_HEADROOM_BYTES = GIB
MACHINE_GIB = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)


def find_fix(inputs: PlanInputs, fits: Callable[[PlanInputs], bool]) -> str:
    """Return the first remedy under which ``fits`` holds."""
    return next(
        (text for text, changed in _remedies(inputs) if fits(changed)),
        "use a smaller model: no machine of up to 2 TiB holds this one",
    )


def _remedies(inputs: PlanInputs) -> Iterator[tuple[str, PlanInputs]]:
    yield from _fewer_slots(inputs)
    context = _longest_context_tokens(inputs)
    if context >= USEFUL_CONTEXT_TOKENS:
        yield _shorter(inputs, context)
    yield from _other_budget(inputs)
    yield from _less_headroom(inputs)
    if context >= LEAST_CONTEXT_TOKENS:
        yield _shorter(inputs, context)
    for gib in MACHINE_GIB:
        machine = _machine_like(inputs.machine, gib * GIB)
        grown = dataclasses.replace(inputs, machine=machine, budget_bytes=None, headroom_bytes=None)
        if gib * GIB > inputs.machine.total_bytes:
            yield f"use a smaller model, or a machine with {gib} GiB", grown


def _least_slots(inputs: PlanInputs) -> int:
    return 1 if inputs.slots_asked == "auto" else inputs.slots_asked


def _sequences(inputs: PlanInputs) -> int:
    """Full-length sequences that have to fit: one, or one for each slot where fewer are refused."""
    return _least_slots(inputs) if inputs.overcommit == "refuse" else 1


def _needed_bytes(inputs: PlanInputs) -> int:
    slots = _least_slots(inputs)
    pool_bytes = inputs.pool_bytes(_sequences(inputs) * inputs.num_blocks_per_sequence)
    return inputs.bytes_beside_pool(slots) + pool_bytes


def _fewer_slots(inputs: PlanInputs) -> Iterator[tuple[str, PlanInputs]]:
    if inputs.slots_asked == "auto":
        return
    for slots in range(inputs.slots_asked - 1, 0, -1):
        yield f"set `slots: {slots}`", dataclasses.replace(inputs, slots_asked=slots)


def _longest_context_tokens(inputs: PlanInputs) -> int:
    num_blocks = inputs.num_blocks_that_fit(_least_slots(inputs)) // _sequences(inputs)
    # One block less than fits: admission counts a sequence with room for one token more.
    longest = min((num_blocks - 1) * inputs.block_size, inputs.max_model_len - 1)
    return longest // _CONTEXT_STEP_TOKENS * _CONTEXT_STEP_TOKENS


def _shorter(inputs: PlanInputs, context: int) -> tuple[str, PlanInputs]:
    return f"set `max_model_len: {context}`", dataclasses.replace(inputs, max_model_len=context)


def _other_budget(inputs: PlanInputs) -> Iterator[tuple[str, PlanInputs]]:
    if inputs.budget_bytes is None:
        return
    excessive = inputs.budget_bytes > inputs.machine_limit_bytes
    budget = inputs.machine_limit_bytes // MIB if excessive else -(-_needed_bytes(inputs) // MIB)
    yield f"set `memory.budget: {budget}MiB`", dataclasses.replace(inputs, budget_bytes=budget * MIB)


def _less_headroom(inputs: PlanInputs) -> Iterator[tuple[str, PlanInputs]]:
    missing = _needed_bytes(inputs) - inputs.limit_bytes
    headroom = (inputs.applied_headroom_bytes - missing) // MIB
    if headroom * MIB >= LEAST_HEADROOM_BYTES:
        changed = dataclasses.replace(inputs, headroom_bytes=headroom * MIB)
        yield f"set `memory.headroom: {headroom}MiB`", changed


def _machine_like(machine: MachineMemory, total_bytes: int) -> MachineMemory:
    """The same machine with more memory: other programs hold what they hold now, the GPU's part grows along."""
    grown = total_bytes - machine.total_bytes
    working_set, available = machine.working_set_bytes, machine.available_bytes
    return dataclasses.replace(
        machine,
        total_bytes=total_bytes,
        available_bytes=None if available is None else available + grown,
        working_set_bytes=None if working_set is None else working_set * total_bytes // machine.total_bytes,
        max_buffer_bytes=None,
    )
