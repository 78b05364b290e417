"""One ledger of all memory, and the plan of slots and KV blocks that it allows.

Owns: the terms with their kind and source, the size of the pool, the choice of slots, and the refusal when the terms
do not add up. Must not know: how bytes are measured, or who allocates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config import MAX_SLOTS
from engine.errors import MemoryPlanError
from engine.memory.fixes import find_fix
from engine.memory.plan_inputs import MIB, PlanInputs, Source
from engine.memory.slots import balance_slots, cap_at_knee, describe_slots

Kind = Literal["permanent", "per_request", "foreign", "reserve"]

# Until this machine's gain is measured, "auto" stops here: in every public measurement on Macs total speed flattens
# between 4 and 16 rows, so a 17th slot would take memory from the person for a gain that nobody has seen.
UNMEASURED_SLOTS = 16


@dataclass(frozen=True, slots=True)
class Term:
    """One line of the ledger; ``num_bytes`` is None when unknown."""

    name: str
    num_bytes: int | None
    kind: Kind
    source: Source

    def __str__(self) -> str:
        return f"{self.name} {format_bytes(self.num_bytes)} ({self.source})"


@dataclass(frozen=True, slots=True)
class Ledger:
    """All memory of the machine, told apart by who holds it and for how long."""

    total_bytes: int
    terms: tuple[Term, ...]

    def __getitem__(self, name: str) -> Term:
        return next(term for term in self.terms if term.name == name)

    def sum_bytes(self, *kinds: Kind) -> int:
        """Sum of the known terms of these kinds."""
        return sum(term.num_bytes or 0 for term in self.terms if term.kind in kinds)

    @property
    def engine_bytes(self) -> int:
        """What this engine holds at full load."""
        return self.sum_bytes("permanent", "per_request")

    @property
    def unassigned_bytes(self) -> int:
        """What nobody is promised; negative when more is promised than the machine has."""
        return self.total_bytes - self.sum_bytes("permanent", "per_request", "foreign", "reserve")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the engine is built with. ``slots_asked``: "auto:6" or "4". ``warnings`` are sentences for a person.

    ``full_length_sequences``: how many of them the pool holds at once; fewer than ``slots`` means overcommitted.
    ``num_state_snapshots``: saved recurrent states. ``num_window_blocks``: of sliding-window layers in a pool of their
    own, 0 where there is none. ``wired_limit_bytes``: GPU memory to keep resident, None where there is no such limit.
    """

    slots: int
    num_blocks: int
    ledger: Ledger
    slots_asked: str
    limit_bytes: int
    full_length_sequences: int
    block_bytes: int
    cache_limit_bytes: int
    num_state_snapshots: int = 0
    num_window_blocks: int = 0
    window_block_bytes: int = 0
    wired_limit_bytes: int | None = None
    warnings: tuple[str, ...] = ()

    def status(self) -> dict[str, int | str | None]:
        """The plan as flat facts for ``/status``."""
        facts: dict[str, int | str | None] = {"slots_asked": self.slots_asked, "limit_bytes": self.limit_bytes}
        for term in self.ledger.terms:
            facts[f"{term.name}_bytes"] = term.num_bytes
            facts[f"{term.name}_source"] = term.source
        return facts | {
            "permanent_bytes": self.ledger.sum_bytes("permanent"),
            "per_request_bytes": self.ledger.sum_bytes("per_request"),
            "unassigned_bytes": self.ledger.unassigned_bytes,
            "machine_bytes": self.ledger.total_bytes,
            "full_length_sequences": self.full_length_sequences,
            "kv_block_bytes": self.block_bytes,
        }

    def pool_use(
        self,
        num_blocks_free: int,
        num_blocks_cached: int,
        num_window_blocks_free: int = 0,
        num_window_blocks_cached: int = 0,
    ) -> dict[str, int]:
        """What the pools are used for now, as flat facts for ``/status``. What is behind a window is not held."""
        num_held = self.num_blocks - num_blocks_free - num_blocks_cached
        num_window_held = self.num_window_blocks - num_window_blocks_free - num_window_blocks_cached
        return {
            "kv_held_bytes": num_held * self.block_bytes + num_window_held * self.window_block_bytes,
            "kv_window_held_bytes": num_window_held * self.window_block_bytes,
            "cached_prefix_bytes": num_blocks_cached * self.block_bytes
            + num_window_blocks_cached * self.window_block_bytes,
        }


def format_bytes(num_bytes: int | None) -> str:
    """Bytes for a person: "512 MiB", "1.44 GiB", "unknown"."""
    if num_bytes is None:
        return "unknown"
    if abs(num_bytes) < 1024 * MIB:
        return f"{num_bytes / MIB:.0f} MiB"
    return f"{num_bytes / (1024 * MIB):.2f} GiB"


def plan_memory(inputs: PlanInputs) -> MemoryPlan:
    """Choose slots and pool. Raises MemoryPlanError with every term and one fix that works when followed."""
    try:
        return _plan(inputs)
    except MemoryPlanError as error:
        fix = find_fix(inputs, _fits)
        terms = "; ".join(str(term) for term in _ledger(inputs, 1, inputs.num_blocks_per_sequence).terms)
        message = (
            f"{error.message} The engine may use {format_bytes(inputs.limit_bytes)} of "
            f"{format_bytes(inputs.machine.total_bytes)}; with one sequence of {inputs.max_model_len} tokens: {terms}."
        )
        raise MemoryPlanError(message, fix) from None


def balanced_slots(inputs: PlanInputs) -> int:
    """The slots that memory alone allows. Raises MemoryPlanError when not even one full-length sequence fits."""
    return balance_slots(MAX_SLOTS, lambda n: _num_blocks_at(inputs, n), inputs.num_blocks_per_sequence).slots


def _fits(inputs: PlanInputs) -> bool:
    try:
        _plan(inputs)
    except MemoryPlanError:
        return False
    return True


def _plan(inputs: PlanInputs) -> MemoryPlan:
    warnings = _budget_warnings(inputs)
    if inputs.slots_asked == "auto":
        slots, note = _auto_slots(inputs)
        warnings += note
    else:
        slots = inputs.slots_asked
    num_blocks = _num_blocks_at(inputs, slots)
    full_length = num_blocks // inputs.num_blocks_per_sequence
    if full_length < 1:
        raise MemoryPlanError(
            f"Weights and one full-length sequence do not fit beside {slots} slots: it needs "
            f"{inputs.num_blocks_per_sequence} KV blocks and {max(0, num_blocks)} are left."
        )
    if full_length < slots:
        warnings.append(_overcommitted(inputs, slots, full_length))
    machine = inputs.machine
    ledger = _ledger(inputs, slots, num_blocks)
    gpu_bytes = ledger.engine_bytes - inputs.model.runtime_bytes
    return MemoryPlan(
        slots=slots,
        num_blocks=num_blocks,
        ledger=ledger,
        slots_asked=describe_slots(inputs.slots_asked, slots),
        limit_bytes=inputs.limit_bytes,
        full_length_sequences=full_length,
        block_bytes=inputs.block_bytes,
        cache_limit_bytes=inputs.model.cache_limit_bytes,
        num_state_snapshots=inputs.num_state_snapshots(slots),
        num_window_blocks=inputs.num_window_blocks(slots),
        window_block_bytes=inputs.model.window_bytes_per_token * inputs.block_size,
        wired_limit_bytes=None if machine.working_set_bytes is None else min(gpu_bytes, machine.working_set_bytes),
        warnings=tuple(warnings),
    )


def _auto_slots(inputs: PlanInputs) -> tuple[int, list[str]]:
    slots = balanced_slots(inputs)
    if not inputs.gains:
        if slots <= UNMEASURED_SLOTS:
            return slots, []
        note = f"memory holds {slots} slots; {UNMEASURED_SLOTS} are used until this machine's gain is measured"
        return UNMEASURED_SLOTS, [note]
    cap = cap_at_knee(slots, inputs.gains)
    return (cap.slots, [cap.reason]) if cap else (slots, [])


def _num_blocks_at(inputs: PlanInputs, slots: int) -> int:
    """The pool beside ``slots`` slots: what memory allows, but no more than they and a bounded prefix cache can use."""
    num_blocks = inputs.num_blocks_that_fit(slots)
    demand = slots * inputs.num_blocks_per_sequence
    if num_blocks <= demand:
        return num_blocks
    cached = min(demand // 2, (num_blocks - demand) // 4) if inputs.prefix_cache else 0
    return demand + cached


def _budget_warnings(inputs: PlanInputs) -> list[str]:
    budget = inputs.budget_bytes
    if budget is None or budget <= inputs.machine_limit_bytes:
        return []
    text = (
        f"`memory.budget` is {format_bytes(budget)}, but this machine can give "
        f"{format_bytes(inputs.machine_limit_bytes)} now."
    )
    if inputs.overcommit == "refuse":
        raise MemoryPlanError(text)
    return [text]


def _overcommitted(inputs: PlanInputs, slots: int, full_length: int) -> str:
    """The warning that fewer full-length sequences fit than there are slots, or a refusal where configured."""
    text = (
        f"{slots} slots were asked for and {full_length} sequences of {inputs.max_model_len} tokens fit at once: "
        f"longer ones will wait or be preempted."
    )
    if inputs.overcommit == "refuse":
        raise MemoryPlanError(text)
    return f'{text} `slots: "auto"` takes what fits.'


def _ledger(inputs: PlanInputs, slots: int, num_blocks: int) -> Ledger:
    model = inputs.model
    foreign_bytes = inputs.machine.foreign_bytes

    def term(name: str, num_bytes: int | None, kind: Kind, source: Source) -> Term:
        return Term(name, num_bytes, kind, model.sources.get(name, source))

    return Ledger(
        inputs.machine.total_bytes,
        (
            term("weights", model.weights_bytes, "permanent", "measured"),
            term("runtime", model.runtime_bytes, "permanent", "measured"),
            term("activations", inputs.activation_bytes(slots), "permanent", "measured"),
            term("mlx_cache_limit", model.cache_limit_bytes, "permanent", "configured"),
            term("state", inputs.state_bytes(slots), "per_request", "computed"),
            term("sampler", inputs.sampler_bytes(slots), "per_request", "computed"),
            term("kv_window", inputs.window_pool_bytes(slots), "per_request", "computed"),
            term("kv_pool", inputs.pool_bytes(num_blocks), "per_request", "computed"),
            Term(
                "headroom",
                inputs.applied_headroom_bytes,
                "reserve",
                "computed" if inputs.headroom_bytes is None else "configured",
            ),
            Term("foreign", foreign_bytes, "foreign", "unknown" if foreign_bytes is None else "measured"),
        ),
    )
